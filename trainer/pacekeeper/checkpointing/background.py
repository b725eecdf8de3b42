"""Background work of the host during training: while a device does the work of the steps, the host's cores are idle."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def run_in_background(call: Callable[[], Result], name: str) -> Future[Result]:
    """Run `call` in a daemon thread called `name`, which does not delay the end of the rank."""
    future: Future[Result] = Future()

    def work() -> None:
        try:
            result = call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError:  # no more threads can be started
        work()
    return future

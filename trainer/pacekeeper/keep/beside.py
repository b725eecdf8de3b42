"""What the host does beside the training: where a device does the work of the steps, the host's cores are idle."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def run_in_background(call: Callable[[], Result], name: str) -> Future[Result]:
    """Calls it in a thread of its own, which does not keep a rank from ending. name: of the thread."""
    future: Future[Result] = Future()

    def work() -> None:
        try:
            found = call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(found)

    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError:  # there can be no more threads
        work()
    return future

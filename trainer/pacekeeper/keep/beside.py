"""What the host does beside the training: where a device does the work of the steps, the host's cores are idle."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Found = TypeVar("Found")


def beside(call: Callable[[], Found], name: str) -> Future[Found]:
    """Calls it in a thread of its own, which does not keep a rank from ending. name: of the thread."""
    future: Future[Found] = Future()

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

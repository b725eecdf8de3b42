"""Keeps this library's frames out of the script's tracebacks.

It imports nothing, because each Python process runs it.
"""

from __future__ import annotations

_OWN_FOLDER = __file__.rpartition("/")[0] + "/"


def hide_frame(error: BaseException) -> None:
    """Remove the caller's frame from the traceback of the exception that it handles; then it re-raises that by `raise`.

    No effect before Python 3.11, where `raise` restores the traceback: see `hide_own_frames`.
    """
    trace = error.__traceback__
    if trace is not None:
        error.__traceback__ = trace.tb_next


def hide_own_frames(error: BaseException) -> None:
    """Remove this library's frames from the traceback of an uncaught exception, and of those that it came from.

    The first frame of a traceback stays: it is the script's.
    """
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        each = pending.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        trace = each.__traceback__
        while trace is not None:
            following = trace.tb_next
            while following is not None and following.tb_frame.f_code.co_filename.startswith(_OWN_FOLDER):
                following = following.tb_next
            if following is not trace.tb_next:
                trace.tb_next = following
            trace = following
        pending += [each.__cause__, each.__context__]

"""Notices requests for a profile window. What takes the window is imported with the first one."""

from __future__ import annotations

from typing import Any

from ..recorder import Recorder
from .watch_folder import WatchFolder


class ProfileRequests:
    """Follows the newest request, for the rank in slot `slot`."""

    def __init__(self, folder: WatchFolder, slot: int, recorder: Recorder) -> None:
        self._folder, self._slot, self._recorder = folder, slot, recorder
        self._seen = folder.read_profile_request()  # of before this process
        self._profile: Any = None  # a `rank_profile.RankProfile`

    def poll(self) -> None:
        """Prepare the window of a new request. One that is open stays. Call it often."""
        text = self._folder.read_profile_request()
        if text in ("", self._seen) or (self._profile is not None and not self._profile.is_over):
            return
        self._seen = text
        from .rank_profile import RankProfile, WindowRequest

        try:
            request = WindowRequest.parse(text)
        except ValueError:
            return  # it is not from Pacekeeper
        self._profile = RankProfile(self._folder, self._slot, self._recorder, request)
        self._profile.arm()

    def stop(self) -> None:
        """Stop a window that is open."""
        if self._profile is not None:
            self._profile.stop()

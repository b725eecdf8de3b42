"""Carries out what passes want done: each effect by itself, once at a time, none in another's way.

A pass never waits for one. What fails is tried again, ever more slowly, as long as passes still want it; until then the
job's condition says what and why, in the API server's words.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import kopf

from pacekeeper_analysis.errors import InputError

from ..effects import CreatePod, Effect
from ..limits import Backoff
from ..observation import BlockedAction
from ..runtime import OperatorRuntime

MAX_CREATIONS_PER_JOB = 16
EFFECT_WAIT_SECONDS = 0.3
"""So long a pass waits for what it has just begun: for a creation that hangs in a slow webhook, no longer."""
FIRST_EFFECT_BACKOFF_SECONDS, LONGEST_EFFECT_BACKOFF_SECONDS = 1.0, 60.0
log = logging.getLogger(__name__)


async def _return_immediately(_effect: Effect) -> None:
    return


@dataclass
class _Attempts:
    """What has become of an effect so far."""

    backoff: Backoff = field(default_factory=lambda: Backoff(FIRST_EFFECT_BACKOFF_SECONDS, LONGEST_EFFECT_BACKOFF_SECONDS))
    not_before: float = 0.0  # by the monotonic clock
    error: str = ""


@dataclass
class EffectRunner:
    """Of one job."""

    runtime: OperatorRuntime
    handle: Callable[[Effect], Awaitable[float]]
    """Seconds for which the same need not be done again, if passes want it still."""
    wake: Callable[[], None]
    """A pass is wanted: something was done, or is to be tried again."""
    name: str = ""
    wait_until_ready: Callable[[Effect], Awaitable[None]] = _return_immediately
    """Returns when the effect's time has come: what nobody wants any more by then is left."""
    _running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _attempts: dict[str, _Attempts] = field(default_factory=dict)
    _wanted: dict[str, Effect] = field(default_factory=dict)  # by the newest pass
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_CREATIONS_PER_JOB))

    async def submit(self, effects: Sequence[Effect]) -> None:
        """Whatever of it is neither under way nor put off is begun now; what is wanted no longer is forgotten.

        What is quick is done when this returns, so that a job's status is not ahead of what it tells of.
        """
        wanted = self._wanted = {effect.key: effect for effect in effects}
        self._attempts = {
            key: tries for key, tries in self._attempts.items() if key in wanted or key in self._running
        }
        now, begun = self.runtime.monotonic(), set()
        for key, effect in wanted.items():
            tries = self._attempts.setdefault(key, _Attempts())
            if key not in self._running and now >= tries.not_before:
                self._running[key] = self.runtime.start_task(self._run(effect, tries), f"{self.name}: {key}")
                begun.add(self._running[key])
        if begun:
            await asyncio.wait(begun, timeout=EFFECT_WAIT_SECONDS)

    @property
    def blocked_actions(self) -> tuple[BlockedAction, ...]:
        """What could not be done so far."""
        failed = ((key, tries) for key, tries in self._attempts.items() if tries.error)
        return tuple(
            BlockedAction(key, tries.error, is_pod_creation=key.startswith(CreatePod.PREFIX)) for key, tries in sorted(failed)
        )

    @property
    def is_busy(self) -> bool:
        return bool(self._running)

    def get_retry_delay(self) -> float:
        """Seconds until something is to be tried again; infinity: nothing is."""
        now = self.runtime.monotonic()
        waits = [tries.not_before - now for key, tries in self._attempts.items() if key not in self._running]
        return max(0.0, min((wait for wait in waits if wait > 0), default=float("inf")))

    async def wait_until_idle(self) -> None:
        """Returns when nothing is under way."""
        while self._running:
            await asyncio.wait(set(self._running.values()))

    async def drain(self, seconds: float) -> None:
        """Return when all that was sent is answered, after `seconds` at the latest. What has not begun is dropped."""
        self._wanted = {}
        if self._running:
            await asyncio.wait(set(self._running.values()), timeout=seconds)

    async def close(self) -> None:
        """Ends what is under way: the API server may have done it all the same."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        self._running.clear()

    async def _run(self, effect: Effect, tries: _Attempts) -> None:
        try:
            await self.wait_until_ready(effect)
            rest = await self._run_in_slot(effect)
            tries.backoff.record_success()
            tries.error = ""
            tries.not_before = self.runtime.monotonic() + rest
        except (kopf.TemporaryError, kopf.PermanentError, InputError) as error:
            self._schedule_retry(effect, tries, str(error))
        except Exception as error:
            log.exception("%s: %s failed", self.name, effect.key)
            self._schedule_retry(effect, tries, repr(error))
        finally:
            self._running.pop(effect.key, None)
            self.wake()

    async def _run_in_slot(self, effect: Effect) -> float:
        """Pods are created so many at a time; all else waits for nobody. A creation that nobody wants any more when its
        turn comes is left."""
        if not isinstance(effect, CreatePod):
            return await self.handle(effect)
        async with self._slots:
            return await self.handle(effect) if effect.key in self._wanted else 0.0

    def _schedule_retry(self, effect: Effect, tries: _Attempts, words: str) -> None:
        pause, tries.error = tries.backoff.record_failure(), words
        tries.not_before = self.runtime.monotonic() + pause * (0.75 + 0.5 * self.runtime.random())
        log.warning("%s: %s: %s; tried again in about %.0f s", self.name, effect.key, words, pause)

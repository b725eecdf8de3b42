"""Runs the effects that passes request: each in its own task, and each key once at a time.

A pass never waits for an effect to finish. A failed effect is retried with backoff as long as passes request it. Until
then the job's condition shows what failed and why, in the API server's words.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import kopf

from pacekeeper_analysis.errors import InputError

from ..async_runtime import OperatorRuntime
from ..decide.effects import CreatePod, Effect
from ..limits import Backoff
from ..state.effect_results import BlockedAction

MAX_CREATIONS_PER_JOB = 16
EFFECT_WAIT_SECONDS = 0.3
"""Seconds that a pass waits for the effects that it has just started. A creation may hang in a slow webhook."""
FIRST_EFFECT_BACKOFF_SECONDS, LONGEST_EFFECT_BACKOFF_SECONDS = 1.0, 60.0
log = logging.getLogger(__name__)


async def _return_immediately(_effect: Effect) -> None:
    return


@dataclass
class _Attempts:
    """The attempts at one effect so far."""

    backoff: Backoff = field(
        default_factory=lambda: Backoff(FIRST_EFFECT_BACKOFF_SECONDS, LONGEST_EFFECT_BACKOFF_SECONDS)
    )
    not_before: float = 0.0  # by the monotonic clock
    error: str = ""


@dataclass
class EffectRunner:
    """The effect runner of one job."""

    runtime: OperatorRuntime
    handle: Callable[[Effect], Awaitable[float]]
    """Executes an effect, and returns the seconds for which it need not be repeated while passes request it."""
    wake: Callable[[], None]
    """Requests a pass: an effect was executed, or is due for a retry."""
    name: str = ""
    wait_until_ready: Callable[[Effect], Awaitable[None]] = _return_immediately
    """Returns when the effect may start. An effect that no pass requests any more by then is dropped."""
    _running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _attempts: dict[str, _Attempts] = field(default_factory=dict)
    _wanted: dict[str, Effect] = field(default_factory=dict)  # by the newest pass
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_CREATIONS_PER_JOB))

    async def submit(self, effects: Sequence[Effect]) -> None:
        """Start each effect that neither runs nor waits for its retry, and forget those that are no longer requested.

        Fast effects are done when this method returns, so that a job's status is not ahead of what it reports.
        """
        requested = self._wanted = {effect.key: effect for effect in effects}
        self._attempts = {
            key: attempts for key, attempts in self._attempts.items() if key in requested or key in self._running
        }
        now, started = self.runtime.monotonic(), set()
        for key, effect in requested.items():
            attempts = self._attempts.setdefault(key, _Attempts())
            if key not in self._running and now >= attempts.not_before:
                self._running[key] = self.runtime.start_task(self._run(effect, attempts), f"{self.name}: {key}")
                started.add(self._running[key])
        if started:
            await asyncio.wait(started, timeout=EFFECT_WAIT_SECONDS)

    @property
    def blocked_actions(self) -> tuple[BlockedAction, ...]:
        """Return the effects that have failed so far."""
        failed = ((key, attempts) for key, attempts in self._attempts.items() if attempts.error)
        return tuple(
            BlockedAction(key, attempts.error, is_pod_creation=key.startswith(CreatePod.PREFIX))
            for key, attempts in sorted(failed)
        )

    @property
    def is_busy(self) -> bool:
        return bool(self._running)

    def get_retry_delay(self) -> float:
        """Return the seconds until an effect is due again; infinity: none is."""
        now = self.runtime.monotonic()
        delays = [attempts.not_before - now for key, attempts in self._attempts.items() if key not in self._running]
        return max(0.0, min((delay for delay in delays if delay > 0), default=float("inf")))

    async def wait_until_idle(self) -> None:
        """Return when no effect runs."""
        while self._running:
            await asyncio.wait(set(self._running.values()))

    async def drain(self, seconds: float) -> None:
        """Return when all requests that were sent are answered, after `seconds` at the latest.

        Drop what has not started.
        """
        self._wanted = {}
        if self._running:
            await asyncio.wait(set(self._running.values()), timeout=seconds)

    async def close(self) -> None:
        """Cancel running effects. The API server may still execute them."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        self._running.clear()

    async def _run(self, effect: Effect, attempts: _Attempts) -> None:
        try:
            await self.wait_until_ready(effect)
            rest_seconds = await self._run_in_slot(effect)
            attempts.backoff.record_success()
            attempts.error = ""
            attempts.not_before = self.runtime.monotonic() + rest_seconds
        except (kopf.TemporaryError, kopf.PermanentError, InputError) as error:
            self._schedule_retry(effect, attempts, str(error))
        except Exception as error:
            log.exception("%s: %s failed", self.name, effect.key)
            self._schedule_retry(effect, attempts, repr(error))
        finally:
            self._running.pop(effect.key, None)
            self.wake()

    async def _run_in_slot(self, effect: Effect) -> float:
        """Execute the effect; pods are created a few at a time, other effects at once.

        A creation that no pass requests any more when its turn comes is dropped.
        """
        if not isinstance(effect, CreatePod):
            return await self.handle(effect)
        async with self._slots:
            return await self.handle(effect) if effect.key in self._wanted else 0.0

    def _schedule_retry(self, effect: Effect, attempts: _Attempts, error: str) -> None:
        pause, attempts.error = attempts.backoff.record_failure(), error
        attempts.not_before = self.runtime.monotonic() + pause * (0.75 + 0.5 * self.runtime.random())
        log.warning("%s: %s: %s; retrying in about %.0f s", self.name, effect.key, error, pause)

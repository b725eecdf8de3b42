"""The terminal view: the job's status, and the table of faults as it fills. Without a terminal, plain lines."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType
from typing import Self

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from demo.job import DemoJobStatus
from demo.report import FaultOutcome

_BARS = "▁▂▃▄▅▆▇█"
UNKNOWN = "–"


class DemoView:
    """A context manager. `log_message` logs a step of the scenario, `show_job` shows the job's present state."""

    def __init__(self, faults: int) -> None:
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, refresh_per_second=4) if self._console.is_terminal else None
        self._started = time.monotonic()
        self._faults = faults
        self._outcomes: list[FaultOutcome] = []
        self._messages: deque[str] = deque(maxlen=8)
        self._speeds: deque[float] = deque(maxlen=60)
        self._job: DemoJobStatus | None = None
        self._loss: float | None = None
        self._printed_at = 0.0

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def log_message(self, message: str) -> None:
        line = f"[{time.monotonic() - self._started:6.1f} s] {message}"
        self._messages.append(line)
        if self._live:
            self._refresh()
        else:
            self._console.print(line, markup=False, highlight=False)

    def show_job(self, job: DemoJobStatus | None, step_seconds: float | None, loss: float | None) -> None:
        self._job, self._loss = job, loss
        if step_seconds:
            self._speeds.append(1.0 / step_seconds)
        if self._live:
            self._refresh()
        elif time.monotonic() - self._printed_at > 10:
            self._printed_at = time.monotonic()
            self.log_message(self._state().plain)

    def add(self, outcome: FaultOutcome) -> None:
        self._outcomes.append(outcome)
        delay = format_optional(outcome.recovered_s, ".1f", " s")
        self.log_message(
            f"{'healed' if outcome.healed else 'NOT HEALED'}: {outcome.fault} → {outcome.remedy or 'nothing'}, {delay}"
        )

    def finish(self) -> None:
        """Print the table permanently."""
        self._console.print(build_table(self._outcomes))

    def _refresh(self) -> None:
        if self._live:
            log = Text("\n".join(self._messages))
            title = f"Pacekeeper · faults healed {sum(outcome.healed for outcome in self._outcomes)} of {self._faults}"
            self._live.update(Group(Panel(self._state(), title=title), build_table(self._outcomes), log))

    def _state(self) -> Text:
        if self._job is None:
            return Text("no job yet")
        loss = f"loss {self._loss:.3f}   " if self._loss is not None else ""
        slowdown = format_optional(self._job.slowdown, ".2f")
        line = (
            f"{self._job.phase or 'Pending'}   step {self._job.step}   {loss}round {self._job.round}   "
            f"slowdown {slowdown}   workers {self._job.ready} + {self._job.spares} spare   {self._job.mode}"
        )
        return Text(f"{line}\nsteps/s {_format_sparkline(list(self._speeds))}" if self._speeds and self._live else line)


def build_table(outcomes: list[FaultOutcome]) -> Table:
    """Return the table of faults and remedies, which fits 80 columns. Times are seconds since the fault."""
    table = Table(
        title="Fault → remedy (seconds since the fault)", box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False
    )
    table.add_column("fault")
    table.add_column("remedy", no_wrap=True)
    for column in ("found", "decided", "healed", "steps\nlost"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("gain")
    for outcome in outcomes:
        times = (outcome.detected_s, outcome.decided_s, outcome.recovered_s)
        table.add_row(
            outcome.fault if outcome.healed else f"[red]{outcome.fault}: NOT HEALED[/]",
            outcome.remedy or UNKNOWN,
            *(format_optional(value, ".1f") for value in times),
            format_optional(outcome.steps_lost, "d"),
            outcome.gain,
        )
    return table


def format_optional(value: float | None, format_spec: str, unit: str = "") -> str:
    """Return the number in this form, and UNKNOWN for None."""
    return UNKNOWN if value is None else f"{value:{format_spec}}{unit}"


def _format_sparkline(values: list[float]) -> str:
    top = max(values)
    return "".join(_BARS[min(int(value / top * (len(_BARS) - 1) + 0.5), len(_BARS) - 1)] for value in values)

"""What holds for all tests."""

from __future__ import annotations

import pytest

collect_ignore = ["gpu"]
"""Tests of unittest, for machines with a GPU and without pytest: `make test-gpu`."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A further try does not hide why it was needed."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"RERUN {report.nodeid} ({report.when})")
        terminalreporter.write_line(report.longreprtext)
        for title, captured in report.sections:
            terminalreporter.write_line(f"{title}: … {captured[-4000:]}")

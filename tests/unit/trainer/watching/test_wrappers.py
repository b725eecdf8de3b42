"""The library's wrappers of torch's functions: warnings and tracebacks of a script look as without them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pacekeeper.watch.payload import build_payload

PYTHONS = sorted({sys.executable, *map(str, Path.home().glob(".pyenv/versions/3.*/bin/python"))})
PROGRAM = textwrap.dedent(
    """
    import sys, traceback, warnings
    if sys.version_info < (3, 9):
        sys.exit()
    from _pacekeeper_rank.hook_guard import HookGuard, call_after
    from _pacekeeper_rank.tracebacks import hide_own_frames

    def load(fails):
        warnings.warn("an old default", FutureWarning, stacklevel=2)
        if fails:
            raise ValueError("a broken file")

    def list_functions(error):
        return [frame.name for frame in traceback.extract_tb(error.__traceback__)]

    guard = HookGuard()
    ended = []
    wrapped = guard.bracket("torch.load", call_after(load, lambda *_: None), lambda: True, lambda *_: ended.append(1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped(False)
        try:
            wrapped(True)
        except ValueError as error:
            assert sys.version_info < (3, 11) or list_functions(error) == ["<module>", "load"], list_functions(error)
            hide_own_frames(error)
            assert list_functions(error) == ["<module>", "load"], list_functions(error)
    assert ended == [1, 1]
    assert {each.filename for each in caught} == {__file__}, [each.filename for each in caught]
    """
)


@pytest.mark.parametrize("python", PYTHONS)
def test_warnings_and_tracebacks_name_the_scripts_lines(python: str, tmp_path: Path) -> None:
    boot = build_payload(tmp_path / "payload")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {"PYTHONPATH": str(boot), "PYTHONDONTWRITEBYTECODE": "1", "HOME": os.environ["HOME"]}
    result = subprocess.run([python, program], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")

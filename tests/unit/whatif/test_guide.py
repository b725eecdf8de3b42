"""The guide's code runs as written."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from pacekeeper_analysis.whatif.causes import SlowdownCause
from pacekeeper_analysis.whatif.inputs.parquet import write_parquet
from pacekeeper_analysis.whatif.synthetic import JobShape
from pacekeeper_analysis.whatif.synthetic_faults import SyntheticJob

GUIDE = Path(__file__).parents[3] / "docs" / "whatif.md"


def test_python_blocks_of_the_guide_run(tmp_path: Path) -> None:
    shape = JobShape(dp=16, pp=4, microbatches=4, steps=4)
    path = tmp_path / "trace-guide.parquet"
    write_parquet(path, SyntheticJob(SlowdownCause.SLOW_WORKER, shape, strength=1.0, noise=0.01, seed=1).build_trace())
    (tmp_path / "meta-guide.yaml").write_text("dp_size: 16\npp_size: 4\n")
    names = {"path": path, "compute_seconds": np.tile([1.0, 1.0, 1.0, 2.0], (8, 1))}
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, names)

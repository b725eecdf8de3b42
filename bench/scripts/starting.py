"""Imports torch, and prints when: what a training script does first."""

import os
import time
from pathlib import Path

import torch

torch.zeros(1)
path = Path(os.environ["FOLDER"]) / f"rank-{os.environ['RANK']}"
temporary = path.with_suffix(".new")
temporary.write_text(str(time.monotonic()))
temporary.replace(path)

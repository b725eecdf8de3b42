"""One thread for torch: this process forks the ranks of other tests, and a fork takes over one thread only."""

from __future__ import annotations

import torch

torch.set_num_threads(1)

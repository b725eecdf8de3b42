"""What the rings and processes of a worker's ranks show: their metrics, stalls, and faults.

Launcher, sidecar, and `pacekeeper watch` use it. It does not import torch.
"""

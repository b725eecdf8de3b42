"""Settings of the synchronization between replicas. This module does not need torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.stragglers.pseudo_gradient import Penalty


@dataclass(frozen=True)
class OuterSGD:
    """The outer optimizer of EDiT and A-EDiT: SGD over pseudo-gradients (arXiv 2412.07210, algorithm 1).

    Raises InputError that names the field.
    """

    lr: float = 0.7
    momentum: float = 0.8
    nesterov: bool = True
    """Without momentum it has no effect."""
    penalty: Penalty = field(default_factory=Penalty)
    """How the replicas' pseudo-gradients are checked and weighted."""
    offload: bool = False
    """Whether the last common parameters and the momentum are in CPU memory.

    This saves two copies of the model on a GPU, and costs two copies over the bus per synchronization.
    """
    prefetch: int = 2
    """Number of units whose all-reduce starts ahead of the forward pass; 0: none, without overlap."""

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise InputError(f"OuterSGD.lr={self.lr} must be above 0; 0.7 is usual")
        if not 0 <= self.momentum < 1:
            raise InputError(f"OuterSGD.momentum={self.momentum} must be at least 0 and below 1; 0.8 is usual")
        if self.prefetch < 0:
            raise InputError(f"OuterSGD.prefetch={self.prefetch} must be 0 or a number of units")

"""Settings of the synchronisation between replicas: no torch is needed to write them down."""

from __future__ import annotations

from dataclasses import dataclass, field

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.pseudo_gradient import Penalty


@dataclass(frozen=True)
class OuterSGD:
    """The outer optimizer of EDiT and A-EDiT: SGD over pseudo-gradients (arXiv 2412.07210, algorithm 1).

    Raises InputError that names the field.
    """

    lr: float = 0.7
    momentum: float = 0.8
    nesterov: bool = True
    """Without a momentum it changes nothing."""
    penalty: Penalty = field(default_factory=Penalty)
    """How the replicas' pseudo-gradients are judged and weighed."""
    offload: bool = False
    """Keeps the last common parameters and the momentum in the CPU's memory: two copies of the model less on a GPU,
    for two copies over the bus a synchronisation."""
    prefetch: int = 2
    """Units whose all-reduce is under way ahead of the forward pass; 0: none, which overlaps nothing."""

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise InputError(f"OuterSGD.lr={self.lr} must be above 0; 0.7 is usual")
        if not 0 <= self.momentum < 1:
            raise InputError(f"OuterSGD.momentum={self.momentum} must be at least 0 and below 1; 0.8 is usual")
        if self.prefetch < 0:
            raise InputError(f"OuterSGD.prefetch={self.prefetch} must be 0 or a number of units")

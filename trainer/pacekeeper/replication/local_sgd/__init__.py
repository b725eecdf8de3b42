"""Local-SGD (EDiT and A-EDiT): replicas train independently and synchronize their parameters periodically."""

from __future__ import annotations

from .equalize import equalize_replicas, reset_moments
from .forward import ForwardPass
from .outer_optimizer import OuterOptimizer
from .replicas import Replicas, Synchronization
from .settings import OuterSGD

__all__ = [
    "ForwardPass",
    "OuterOptimizer",
    "OuterSGD",
    "Replicas",
    "Synchronization",
    "equalize_replicas",
    "reset_moments",
]

"""Local-SGD (EDiT and A-EDiT): replicas train by themselves and synchronise their parameters now and then."""

from __future__ import annotations

from .equalise import equalize_replicas, reset_moments
from .forward import ForwardPass
from .outer import OuterOptimizer
from .replicas import Replicas, Synchronization
from .settings import OuterSGD

__all__ = ["ForwardPass", "OuterOptimizer", "OuterSGD", "Replicas", "Synchronization", "equalize_replicas", "reset_moments"]

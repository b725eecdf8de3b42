"""Local-SGD (EDiT and A-EDiT): replicas train by themselves and synchronise their parameters now and then."""

from __future__ import annotations

from .equalise import equalise, reset_moments
from .forward import ForwardPass
from .outer import OuterOptimizer
from .replicas import Replicas, Synchronisation
from .settings import OuterSGD

__all__ = ["ForwardPass", "OuterOptimizer", "OuterSGD", "Replicas", "Synchronisation", "equalise", "reset_moments"]

"""What faults affect: workers and operator pods, by their roles."""

from __future__ import annotations

from enum import StrEnum


class TargetMissing(Exception):
    """The target of a fault does not exist at present. The message names it."""


class TargetRole(StrEnum):
    """The role of a worker."""

    MEMBER = "member"  # it has ranks in the stored plan
    SPARE = "spare"  # any other running worker


class OperatorTarget(StrEnum):
    """The role of an operator pod."""

    LEADER = "leader"
    STANDBY = "standby"

"""The collectives of a rank's last steps, as an investigation of a job's communication sends them: 32 bytes each."""

from __future__ import annotations

import base64
import binascii

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError

OPERATION = np.dtype(
    [
        ("step", "<u4"),
        ("collective", "u1"),  # a records.Collective
        ("flags", "u1"),  # as in a record
        ("group", "<u2"),  # position in the evidence's list of communicators; NO_GROUP: in none of them
        ("sequence", "<u4"),  # inside the group, from 1
        ("peer", "<i4"),  # global rank, of a send or receive; -1: none
        ("bytes", "<f4"),
        ("start", "<f4"),  # seconds after this rank began the step
        ("end", "<f4"),
        ("wait", "<f4"),  # seconds up to `end` in which this rank only waited for it; 0: it did other work
    ]
)
NO_GROUP = 0xFFFF
MAX_OPERATIONS = 4096
"""Upper limit of operations of one rank in one message: the newest complete steps that fit."""
MAX_OPERATIONS_CHARACTERS = 4 * ((MAX_OPERATIONS * OPERATION.itemsize + 2) // 3)


def encode_operations(operations: NDArray[np.void]) -> str:
    """Encode operations as text. Raises ValueError for more than MAX_OPERATIONS."""
    if len(operations) > MAX_OPERATIONS:
        raise ValueError(f"{len(operations)} operations are more than {MAX_OPERATIONS}")
    return base64.b64encode(operations.astype(OPERATION).tobytes()).decode()


def decode_operations(text: str) -> NDArray[np.void]:
    """Return an array of dtype OPERATION.

    Raises InputError if the text is malformed or its numbers are not measurements.
    """
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError("operations: are not base64") from error
    if len(data) % OPERATION.itemsize or len(data) > MAX_OPERATIONS * OPERATION.itemsize:
        raise InputError(f"operations: {len(data)} bytes are not a list of at most {MAX_OPERATIONS} operations")
    operations = np.frombuffer(data, OPERATION)
    for name in ("bytes", "start", "end", "wait"):
        if not np.isfinite(operations[name]).all() or (operations[name] < 0).any():
            raise InputError(f"operations: {name} must be finite and not below 0")
    if (operations["end"] < operations["start"]).any():
        raise InputError("operations: one ends before it starts")
    return operations

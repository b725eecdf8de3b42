"""numpy's types of what a rank measures: `pacekeeper_rank.records` describes the layouts."""

from __future__ import annotations

from typing import Any

import numpy as np

from pacekeeper_rank.records import (
    ENTERED_GROUP_FIELDS,
    MAX_ENTERED_GROUPS,
    RING_HEADER_BYTES,
    RING_RECORD_BYTES,
    RING_RECORD_FIELDS,
    RING_STATE_BYTES,
    RING_STATE_FIELDS,
)

_ENTERED_GROUPS: Any = (list(ENTERED_GROUP_FIELDS), (MAX_ENTERED_GROUPS,))

RING_RECORD = np.dtype(list(RING_RECORD_FIELDS))
"""One record, 64 bytes."""

RING_STATE = np.dtype(
    [(name, *(_ENTERED_GROUPS if name == "entered" else (form,))) for name, form in RING_STATE_FIELDS]
)
"""The rank's present state, at the beginning of the ring's header page."""

assert RING_RECORD.itemsize == RING_RECORD_BYTES
assert RING_STATE.itemsize == RING_STATE_BYTES <= RING_HEADER_BYTES

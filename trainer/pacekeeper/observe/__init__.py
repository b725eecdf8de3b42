"""Observation of a rank from within: records in a ring, and windows of steps computed from them."""

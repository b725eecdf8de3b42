"""Verdicts from a job's own evidence: who hangs, who holds the others back, or whether all are slow alike.

Each module is one pure function over reports; none knows of Kubernetes, and the operator and `pacekeeper run --local`
use the same.
"""

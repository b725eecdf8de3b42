"""Verdicts from a job's own evidence: who hangs, and who holds the others back.

Each module is one pure function over reports; none knows of Kubernetes, and the operator and `pacekeeper run --local`
use the same.
"""

"""Diagnoses from a job's own evidence: which rank hangs, and why a rank failed.

Each module is a set of pure functions over reports. None depends on Kubernetes. The operator and `pacekeeper run
--local` use the same ones.
"""

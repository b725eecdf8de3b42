"""Conversion of other kinds of training jobs to TrainingJobs. Pure.

`objects.py` has the entry point. Each kind of source has a module: `pytorchjobs.py`, `trainjobs.py`, `jobsets.py`, and
`indexed_jobs.py`. They take fields from the source (`fields.py`), and write a draft (`draft.py`): a TrainingJob, and a
note about each field of the source. The other modules convert what the kinds have in common.
"""

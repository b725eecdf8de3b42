"""`kubectl pacekeeper`: what stands in the API, in words, and what a person on call does about it.

It needs nothing but kubectl, and has the caller's own rights. `kubectl.py` is the one place that calls it; `jobs.py`,
`incidents.py` and `nodes.py` are words, pure; `command.py` has the verbs.
"""

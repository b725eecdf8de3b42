"""`kubectl pacekeeper`: a command that explains what the API holds, and takes the actions of the on-call engineer.

It needs only kubectl, and has the caller's own permissions. Only `kubectl.py` calls kubectl. `jobs.py`, `incidents.py`,
and `nodes.py` format text, and are pure. `convert.py` reads jobs of other kinds and writes TrainingJobs. `command.py`
has the verbs.
"""

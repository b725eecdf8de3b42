"""`pacekeeper run`: PID 1 of the trainer container. It follows the worker's plan and starts rounds of ranks in place.

Start reading at `rounds.py` (what the launcher decides), `meeting.py` (what the launchers of a job agree on) and
`watch.py` (when ranks stand still), all pure; `launcher.py` joins them to the world: the warm process that forks ranks
(`warm.py`, `rank.py`), their output, the peers (`wire.py`), looks at processes and neighbours (`inspection.py`) and the
runtime folder that the sidecar reads.
"""

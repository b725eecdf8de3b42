"""`pacekeeper run`: PID 1 of the trainer container. It follows the worker's plan and starts rounds of ranks in place.

Three modules are pure: start reading there.

* `rendezvous/rounds.py`: what the launcher decides.
* `rendezvous/rendezvous.py`: what the launchers of a job agree on.
* `pacekeeper/health/stall_detector.py`: when ranks are stalled.

`launcher.py` connects them to I/O: the warm process that forks ranks (`ranks/warm_process.py`, `ranks/rank.py`), their
output, the other launchers (`rendezvous/transport.py`), samples of processes and probes of peers
(`health/inspection.py`), and the runtime folder that the sidecar reads.
"""

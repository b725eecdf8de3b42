"""Workers of jobs: launchers and sidecars around their real pure parts, and ranks that only pretend to train.

Start reading at `worker.py` (a pod), `launcher.py` and `sidecar.py` (its two processes). `training_round.py` has the
ranks of one round, which train together.
"""

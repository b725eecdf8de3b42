"""The job's state: saved in shared memory and on the volume, and restored from there.

`state_store` is the entry point. `training_state` gathers the state from the registered objects, `snapshot_writer` and
`checkpoint_writer` save it, `state_sources` restores it. The other modules are the files that are written, and their
descriptions.
"""

"""The job's state: kept in shared memory and on the volume, and brought back from there.

`store` is the way in. `state` gathers the state from the registered objects, `snapshot_writer` and `checkpoint_writer`
keep it, `sources` brings it back. The other modules are the files that are written, and what they say of themselves.
"""

"""The job's state: kept in shared memory and on the volume, and brought back from there."""

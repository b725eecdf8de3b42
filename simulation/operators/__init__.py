"""The operator's pods: the real process, with I/O that leads into the simulation."""

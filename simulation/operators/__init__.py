"""The operator's pods: the real process, on edges that lead into the simulation."""

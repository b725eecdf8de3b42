"""Readers of the traces that people have. Each imports its heavy library only when it is called."""

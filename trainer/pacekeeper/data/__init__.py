"""Assignment of samples to ranks, and their loading."""

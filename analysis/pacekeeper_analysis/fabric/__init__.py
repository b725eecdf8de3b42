"""Traffic planning (C4P, arXiv 2406.04594): ranks in the fabric's order, and flows on separate routes."""

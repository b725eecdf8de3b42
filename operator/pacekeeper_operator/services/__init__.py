"""What the operator does for all jobs at once."""

"""What the operator does for all jobs together."""

"""Which samples a rank takes, and how they come to it."""

"""How the ranks train together: what a plan orders, how they agree on it, and what happens at ordinals."""

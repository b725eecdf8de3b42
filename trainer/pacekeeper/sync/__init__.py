"""How the ranks train together: the plan's directives, how ranks agree on them, and what happens at sync points."""

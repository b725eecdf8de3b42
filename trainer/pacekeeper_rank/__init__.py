"""What a rank records of itself: the same in ranks of a TrainingJob and in watched ones.

It needs Python 3.9 and torch 2.4, imports nothing but the standard library and what the script has imported, and has
relative imports only, so that it works under any name. `monitoring` starts it.
"""

"""Behaviour windows on the rank: for some seconds it looks at its own Python stacks and kernels, and says in a few
kilobytes where its time went (`pacekeeper_analysis.behaviour`). Outside of a window nothing of this runs but a look at
the plan's file now and then.

`watch`: when windows begin and end. `sampler`: the looks. `sources`: names of functions. `spans`: what is known
exactly. `machine`: how the process is set up, and what its processors did.
"""

from .watch import start_rank_profiler

__all__ = ["start_rank_profiler"]

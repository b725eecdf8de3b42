"""Profiles on the rank: for some seconds it samples its own Python stacks and kernels, and reduces them to a pattern.

The pattern shows in a few kilobytes where the rank's time went (`pacekeeper_analysis.profiling`). Outside of a profile
window only an occasional poll of the plan's file runs.

`rank_profiler`: when windows begin and end. `stack_sampler`: the samples. `function_names`: names of functions.
`known_spans`: exactly known times. `machine_counters`: setup of the process, and statistics of its processors.
"""

from .rank_profiler import start_rank_profiler

__all__ = ["start_rank_profiler"]

"""Profiles on the rank: for some seconds it samples its own Python stacks and kernels, and reduces them to a pattern.

The pattern shows in a few kilobytes where the rank's time went (`pacekeeper_analysis.profiling`). Outside of a profile
window only an occasional poll of the plan's file runs.

`rank_profiler`: when windows begin and end. `known_spans`: exactly known times. `kernel_profile`: those of a GPU.
`path_hashes`: names without paths. `machine_counters`: setup of the process, and statistics of its processors. The
samples are those of `pacekeeper_rank.profiling`. `known_spans` and `path_hashes` need no torch: sidecars use them.
"""

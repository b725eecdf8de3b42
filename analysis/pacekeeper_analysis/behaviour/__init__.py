"""Behaviour windows: what each rank's functions did in the same steps, and which of them makes a job slow (PerfTracker,
arXiv 2506.08528).

`reduce`: on the rank, from samples and spans to a `pattern` of a few kilobytes. `localise`: in the operator, from all
ranks' patterns to the function, the ranks and the class of fault. `page`: what is kept of it for people.
"""

"""Profile windows: what each rank's functions did in the same steps, and which of them slows a job down.

The method follows PerfTracker (arXiv 2506.08528). `reduce` runs on the rank: it turns samples and spans into a
`pattern` of a few kilobytes. `localize` runs in the operator: it finds the function, the ranks and the class of the
fault in all ranks' patterns. `page` stores the result for people.
"""

"""The same scenarios in the simulation and on the test cluster.

If the two differ, the simulation is inaccurate, or it has revealed something about the operator.
"""

"""The same disasters in the simulation and on the test cluster: where the two differ, the simulation is wrong about the
world, or has discovered something about the operator."""

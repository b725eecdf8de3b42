"""The real operator in a simulated cluster under virtual time. Each run injects faults and is a function of its seed.

A development tool, like `testcluster`; none of it is installed. README.md describes how to use it.
"""

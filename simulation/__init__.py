"""The real operator in a made-up cluster under virtual time: thousands of disasters, each a function of its seed.

A development tool, as `testcluster` is; nothing of it is installed. README.md says how to use it.
"""

"""The test runner: `make test` runs every part side by side and measures what each part costs.

`python -m tests.run` runs all parts, `python -m tests.run NAME…` some of them, and `python -m tests.run.changed` the
tests that the changes of the working tree can affect. The table of parts is in `parts`.
"""

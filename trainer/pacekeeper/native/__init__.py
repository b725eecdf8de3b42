"""What is written in C: hatch_build.py builds it. Each part may be missing."""

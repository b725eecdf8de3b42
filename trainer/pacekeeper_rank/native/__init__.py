"""What recording does in C: hatch_build.py builds it. It may be missing."""

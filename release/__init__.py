"""`make release`: builds wheels, images, and the chart of a release, from locked inputs only.

Modules without effects: `archives`, `elf`, `oci`, `sbom`. The others run compilers and package managers.
"""

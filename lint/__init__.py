"""Checks of names, layout, and prose that no linter has (docs/style.md). `make lint` runs them."""

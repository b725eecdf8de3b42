"""Decisions about jobs that others have created: they are described, diagnosed, and reported, and never acted on."""

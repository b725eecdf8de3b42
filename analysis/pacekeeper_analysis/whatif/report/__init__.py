"""Output of an analysis: a summary in the terminal, a page, JSON, and timelines for Perfetto."""

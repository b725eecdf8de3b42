"""One script a claim; each measures both sides, and the last line of its standard output is one JSON object."""

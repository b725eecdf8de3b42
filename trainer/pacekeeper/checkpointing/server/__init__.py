"""The checkpoint server: it gives all workers of a job the files of a claim that only one node can mount."""

"""JobSets that the operator runs as TrainingJobs: which TrainingJob, its changes, and the JobSet's status. Pure."""

"""The models on all ranks: the same after every step, or replicas that train independently and synchronize."""

"""The models on all ranks: alike after every step, or replicas that train by themselves and synchronise."""

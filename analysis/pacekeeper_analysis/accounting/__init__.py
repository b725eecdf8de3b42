"""What the GPUs of jobs were used for: useful steps, and losses by cause. Pure."""

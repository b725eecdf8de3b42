"""Writes down what a script sees of its launcher: arguments, and the environment that torchrun promises."""

import json
import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "3"  # which torch reads when it is imported

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()  # a rank that leaves before its peer has connected to it holds the peer up for minutes
promised = [
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("ROLE_WORLD_SIZE", "ROLE_NAME", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
]
seen = {
    "arguments": sys.argv[1:],
    "environment": {name: os.environ[name] for name in promised},
    "torchelastic": dist.is_torchelastic_launched(),
    "module": __name__,
    "threads": torch.get_num_threads(),
}
(Path(sys.argv[1]) / f"{os.environ['RANK']}.json").write_text(json.dumps(seen))
print(f"rank {os.environ['RANK']} is here", flush=True)
dist.destroy_process_group()

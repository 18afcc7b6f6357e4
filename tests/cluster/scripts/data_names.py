"""A gloo job that prints the files in its data folder."""

import os
from pathlib import Path

import torch.distributed as dist

folder = Path(os.environ["DDPJOB_DATA_DIR"])
dist.init_process_group("gloo")
names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p.name[:8] != ".ddpjob-")
print(f"{folder} has {' '.join(names)}", flush=True)
dist.barrier()
dist.destroy_process_group()

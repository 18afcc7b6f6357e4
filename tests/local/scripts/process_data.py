"""A gloo job that prints the contents of its data. With --wait, its ranks wait for a file in the
checkpoint folder.
"""

import hashlib
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

folder = Path(os.environ["DDPJOB_DATA_DIR"])
dist.init_process_group("gloo")
digest = hashlib.sha256()
files = sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith(".ddpjob-"))
for path in files:
    digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
keys = [name for name in os.environ if name.startswith("DDPJOB_DATA_AWS_")]
print(f"rank {dist.get_rank()} has {len(files)} files, {digest.hexdigest()}, keys {keys}", flush=True)
while "--wait" in sys.argv and not (Path(os.environ["DDPJOB_CHECKPOINT_DIR"]) / "go").exists():
    time.sleep(0.05)
dist.barrier()
dist.destroy_process_group()

"""A small gloo job that saves, resumes and keeps a ledger. Flags cause faults."""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10, help="at most; less if a file named enough is there")
parser.add_argument("--sleep", type=float, default=0.05)
parser.add_argument("--raise-at", type=int, default=-1, help="rank 1 fails at this step, in every life")
FOLDER = Path(os.environ["DDPJOB_CHECKPOINT_DIR"])
asked_to_end = False


def on_sigterm(number: int, frame: object) -> None:
    """Remember the signal; the end of the step acts on it."""
    global asked_to_end
    asked_to_end = True


def save(step: int) -> None:
    """Save the number of completed steps atomically."""
    (FOLDER / "new").write_text(str(step))
    (FOLDER / "new").rename(FOLDER / "step")


def main() -> None:
    """Sum over the ranks, record the step, and save."""
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, on_sigterm)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    begin = torch.tensor([int((FOLDER / "step").read_text()) if (FOLDER / "step").exists() else 0])
    dist.broadcast(begin, 0)
    print(f"rank {rank} of {dist.get_world_size()} begins at step {begin.item()}", flush=True)
    with (FOLDER / f"ledger-{rank}").open("a") as ledger:
        for step in range(int(begin), args.steps):
            if rank == 1 and step == args.raise_at:
                raise ValueError(f"made to fail at step {step}")
            flag = torch.tensor([float(asked_to_end), float((FOLDER / "enough").exists())])
            dist.all_reduce(flag)
            ledger.write(f"{step}\n")
            ledger.flush()
            if rank == 0:
                save(step + 1)
            if flag[0]:
                dist.barrier()
                sys.exit(75)
            if flag[1]:
                break
            time.sleep(args.sleep)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

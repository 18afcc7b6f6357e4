"""A plain DDP script: no @record, no signal handling. `--steps N`, `--sleep S`; faults to order: `--raise-at`, `--raise-rank`, ..."""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--sleep", type=float, default=0.05)
parser.add_argument("--raise-at", type=int, default=-1, help="this step fails, once in the job's life")
parser.add_argument("--exit-at", type=int, default=-1)
parser.add_argument("--late", type=float, default=0.0, help="rank 1 works so many seconds longer than rank 0")
parser.add_argument("--fail-last", action="store_true", help="rank 1 fails at the very end, once")
parser.add_argument("--rank", type=int, default=1)


def once(name: str) -> bool:
    """True the first time in this job."""
    path = Path(os.environ["OUT"]) / name
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def main() -> None:
    """Sum over the ranks at each step and write down when it was made."""
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with (Path(os.environ["OUT"]) / f"steps-{rank}").open("a") as ledger:
        for step in range(args.steps):
            if step == args.raise_at and rank == args.rank and once("raised"):
                raise ValueError(f"told to fail at step {step}")
            if step == args.exit_at and rank == args.rank and once("exited"):
                os._exit(7)
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            ledger.write(f"{time.time()} {os.getpid()} {step}\n")
            ledger.flush()
            time.sleep(args.sleep)
    dist.barrier()
    dist.destroy_process_group()
    if rank == args.rank:
        time.sleep(args.late)
        if args.fail_last and once("failed-last"):
            raise ArithmeticError("told to fail at the very end")


if __name__ == "__main__":
    main()

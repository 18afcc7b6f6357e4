"""A plain distributed script without @record. Each step sums over all ranks. Flags request faults,
which occur once per job.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20, help="less when the file OUT/enough appears")
parser.add_argument("--sleep", type=float, default=0.05)
parser.add_argument("--rank", type=int, default=1, help="whom the faults below hit")
parser.add_argument("--ddp", action="store_true", help="train a model; else only sum")
parser.add_argument("--raise-at", type=int, default=-1)
parser.add_argument("--exit-at", type=int, default=-1)
parser.add_argument("--always", action="store_true", help="the fault of --raise-at happens in every life")
parser.add_argument("--hang-at", type=int, default=-1, help="this rank stops there while the others wait for it")
parser.add_argument("--late", type=float, default=0.0, help="this rank works so many seconds longer than the others")
parser.add_argument("--fail-last", action="store_true", help="this rank fails at the very end")
parser.add_argument("--trap", action="store_true", help="on SIGTERM all ranks agree, save and leave with 75")
OUT = Path(os.environ["OUT"])
asked_to_end = False


def once(name: str) -> bool:
    """Return True the first time in this job."""
    try:
        (OUT / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def trainer():
    """Return a function that takes one optimizer step under DDP."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step():
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def agreed() -> tuple[bool, bool]:
    """Return (whether any rank was asked to stop, whether any rank has seen the file "enough").
    This is also the step's collective.
    """
    flags = torch.tensor([float(asked_to_end), float((OUT / "enough").exists())])
    dist.all_reduce(flags)
    return bool(flags[0]), bool(flags[1])


def on_sigterm(number: int, frame: object) -> None:
    """Record the signal. The end of the step acts on it."""
    global asked_to_end
    asked_to_end = True


def faults(args: argparse.Namespace, step: int) -> None:
    """Carry out the faults requested for this step."""
    if step == args.raise_at and (args.always or once("raised")):
        raise ValueError(f"made to fail at step {step}")
    if step == args.exit_at and once("exited"):
        os._exit(7)
    if step == args.hang_at and once("hung"):
        wait_for_ever()


def wait_for_ever() -> None:
    """Hang as in a deadlock."""
    while True:
        time.sleep(1)


def main() -> None:
    """Take steps and record their times."""
    args = parser.parse_args()
    if args.trap:
        signal.signal(signal.SIGTERM, on_sigterm)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    make_step = trainer() if args.ddp else None
    with (OUT / f"steps-{rank}").open("a") as ledger:
        for step in range(args.steps):
            if rank == args.rank:
                faults(args, step)
            if make_step:
                make_step()
            asked_to_end, enough = agreed()
            if asked_to_end:
                (OUT / f"saved-{rank}").touch()
                sys.exit(75)
            ledger.write(f"{time.time()} {os.getpid()} {step}\n")
            ledger.flush()
            if enough:
                break
            time.sleep(args.sleep)
    time.sleep(0.1)  # Gloo's thread frees the last tensors. destroy_process_group waits for it without letting it run.
    dist.destroy_process_group()
    if rank == args.rank:
        time.sleep(args.late if once("late") else 0)
        if args.fail_last and once("failed-last"):
            raise ArithmeticError("made to fail at the very end")


if __name__ == "__main__":
    main()

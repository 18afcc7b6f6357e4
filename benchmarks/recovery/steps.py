"""A plain DDP script without this project's code: digits, a small network, a log line per step.

    torchrun ... steps.py FOLDER [--steps N] [--sleep SECONDS] [--batch N] [--width N] [--save-every N] [--cuda]

All ranks share FOLDER. It contains `digits.pt` (images, labels). Rank 0 saves a checkpoint there
after every step, and every start resumes from it. An incarnation is one process group, from
init_process_group to its end; rank 0 draws a random number that identifies it. A rank's first line
records when its launcher and process began, and when torch was imported, the device ready and the
group formed. With --cuda, the ranks share the machine's GPUs. They use NCCL if each rank has its
own GPU, as NCCL requires, and otherwise gloo.
"""

import argparse
import json
import os
import random
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

IMPORTED = time.time()
HANG = "hang"
"""A file with this name in FOLDER makes the last rank hang, once."""


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--sleep", type=float, default=0.02)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--save-every", type=int, default=1)
    parser.add_argument("--cuda", action="store_true")
    return parser.parse_args()


def network(width):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


class Log:
    """The log of a process, in a file named after its node."""

    def __init__(self, folder, incarnation, moments):
        self.common = {
            "incarnation": incarnation,
            "rank": dist.get_rank(),
            "world": dist.get_world_size(),
            "node": os.environ["DDPJOB_POD"],
        }
        self.file = (folder / f"steps-{self.common['node']}-{os.getpid()}-{incarnation}.jsonl").open("a", buffering=1)

        launcher, process = process_starts()
        moments = {"launcher": launcher, "process": process, "imported": IMPORTED, **moments}
        self.file.write(json.dumps({**self.common, "moments": moments}) + "\n")

    def step(self, step):
        self.file.write(json.dumps({**self.common, "step": step, "t": time.time()}) + "\n")


def process_starts():
    """Return the Unix times at which the launcher and this process began, to 10 ms; see proc(5)."""
    pid = launcher = os.getpid()
    while pid > 0:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"launcher" in words or b"torch.distributed.run" in words:
            launcher = pid
        pid = int(stat(pid)[1])
    booted = time.time() - float(Path("/proc/uptime").read_text().split()[0])
    return tuple(booted + int(stat(pid)[19]) / os.sysconf("SC_CLK_TCK") for pid in (launcher, os.getpid()))


def stat(pid):
    """Return the fields of /proc/PID/stat from the process's state onwards.

    The process name, which precedes them, may contain any character.
    """
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def new_incarnation():
    incarnation = torch.tensor([random.SystemRandom().getrandbits(48)])
    dist.broadcast(incarnation, 0)
    return int(incarnation)


def ready_device(cuda):
    """Return the device on which this rank computes, and the group's backend."""
    if not cuda:
        return torch.device("cpu"), "gloo"
    count = torch.cuda.device_count()
    device = torch.device("cuda", int(os.environ["RANK"]) % count)
    torch.cuda.set_device(device)
    torch.ones(1, device=device).item()
    return device, "cpu:gloo,cuda:nccl" if int(os.environ["WORLD_SIZE"]) <= count else "gloo"


def save(path, step, model, optimizer):
    temporary = path.with_suffix(".tmp")
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, temporary)
    temporary.rename(path)


def main():
    options = arguments()
    torch.set_num_threads(1)
    device, backend = ready_device(options.cuda)
    ready = time.time()
    dist.init_process_group(backend)
    log = Log(options.folder, new_incarnation(), {"device": ready, "formed": time.time()})
    rank, world = dist.get_rank(), dist.get_world_size()
    images, labels = (values.to(device) for values in torch.load(options.folder / "digits.pt"))
    model = network(options.width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    step, checkpoint = 0, options.folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    parallel = DistributedDataParallel(model)
    while step < options.steps:
        if rank == world - 1 and (options.folder / HANG).exists():
            (options.folder / HANG).unlink()
            threading.Event().wait()
        mine = [(step * options.batch + i) % len(images) for i in range(rank, options.batch, world)]
        loss = nn.functional.cross_entropy(parallel(images[mine]), labels[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()
        step += 1
        if rank == 0 and options.save_every and step % options.save_every == 0:
            save(checkpoint, step, model, optimizer)
        log.step(step)
        time.sleep(options.sleep)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

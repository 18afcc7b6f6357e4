"""A training script with a state of any size, the same for all systems compared in a trace.

    torchrun ... training.py FOLDER [--state BYTES] [--step SECONDS] [--save-seconds N] [--cuda]
    python training.py FOLDER --torchft ...

It trains the network of steps.py. Frozen weights enlarge the state, so the time of a step does not
depend on the size of the state. `--step` is the time spent in the middle of each step, either
asleep or on GPU matrix products. `ddpjob_report.Snapshots` does nothing outside a DDPJob, so stock
torchrun and DDPJob run the same lines. torchft needs its own process group, optimizer and loop
(`--torchft`). A system's work to keep or agree on the state is part of the step that the log shows.

Each line of the log identifies the group that took a step, by a random number drawn by rank 0 or by
torchft's quorum number. `cpu` is the CPU time of the process.
"""

import argparse
import json
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.recovery.steps import network, new_incarnation

PIECE = 1 << 24
"""Size of one frozen tensor in bytes, about that of a layer."""
WIDTH = 64


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--state", type=int, default=0, help="minimum size of weights and optimizer state together, in bytes"
    )
    parser.add_argument("--step", type=float, default=0.05)
    parser.add_argument("--save-seconds", type=float, default=60.0)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--torchft", action="store_true")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds of torchft's collectives")
    return parser.parse_args()


def build(state, device):
    """Return a network and its optimizer, whose combined size is `state` bytes if that is
    possible.
    """
    model = network(WIDTH)
    left = state - 2 * sum(weights.numel() * weights.element_size() for weights in model.parameters())
    pieces = [min(PIECE, left - start) for start in range(0, left, PIECE)]
    model[0].frozen = nn.ParameterList(nn.Parameter(torch.ones(size // 4), requires_grad=False) for size in pieces)
    model.to(device)
    return model, torch.optim.SGD([w for w in model.parameters() if w.requires_grad], lr=0.01, momentum=0.9)


class Log:
    """The log of a process, in a file named after its node and its id."""

    def __init__(self, folder):
        self.node = os.environ["DDPJOB_POD"]
        self.file = (folder / f"steps-{self.node}-{os.getpid()}.jsonl").open("a", buffering=1)

    def step(self, step, incarnation, rank, world):
        line = {"incarnation": incarnation, "rank": rank, "world": world, "node": self.node, "step": step}
        self.file.write(json.dumps({**line, "t": time.time(), "cpu": time.process_time()}) + "\n")


class Checkpoint:
    """A file that one rank writes at regular intervals, as scripts do."""

    def __init__(self, folder, seconds, device):
        self.path, self.seconds, self.device, self.saved = folder / "checkpoint.pt", seconds, device, time.monotonic()

    def load(self, model, optimizer):
        """Restore network and optimizer, and return the number of completed steps; 0 without a
        file.
        """
        if not self.path.exists():
            return 0
        saved = torch.load(self.path, map_location=self.device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        return saved["step"]

    def save(self, step, model, optimizer):
        if time.monotonic() - self.saved < self.seconds:
            return
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, temporary)
        temporary.rename(self.path)
        self.saved = time.monotonic()


def idle(seconds, device):
    """Return a function that takes about as long as a step should take."""
    if device.type == "cpu":
        return lambda: time.sleep(seconds)
    matrix = torch.ones(4096, 4096, device=device)

    def multiply(count):
        began = time.perf_counter()
        for _ in range(count):
            matrix @ matrix
        torch.cuda.synchronize()
        return time.perf_counter() - began

    multiply(3)
    count = max(1, round(seconds / (multiply(10) / 10)))
    return lambda: multiply(count)


def batch(data, step, rank, world, size):
    images, labels = data
    mine = [(step * size + i) % len(images) for i in range(rank, size, world)]
    return images[mine], labels[mine]


def train(options):
    import ddpjob_report

    device = torch.device("cuda", int(os.environ["RANK"]) % torch.cuda.device_count()) if options.cuda else "cpu"
    device = torch.device(device)
    dist.init_process_group("gloo")
    rank, world, incarnation = dist.get_rank(), dist.get_world_size(), new_incarnation()
    data = [values.to(device) for values in torch.load(options.folder / "digits.pt")]
    model, optimizer = build(options.state, device)
    snapshots = ddpjob_report.Snapshots(model=model, optimizer=optimizer)
    checkpoint = Checkpoint(options.folder, options.save_seconds, device)
    step = snapshots.step if snapshots.restored else checkpoint.load(model, optimizer)
    parallel = DistributedDataParallel(model, init_sync=not snapshots.restored)
    work, log = idle(options.step, device), Log(options.folder)
    while True:
        optimizer.zero_grad()
        images, labels = batch(data, step, rank, world, options.batch)
        loss = nn.functional.cross_entropy(parallel(images), labels)
        work()
        loss.backward()
        optimizer.step()
        step += 1
        snapshots.take(step)
        if rank == 0:
            checkpoint.save(step, model, optimizer)
        log.step(step, incarnation, rank, world)


def train_with_torchft(options):
    from torchft import DistributedDataParallel as Parallel
    from torchft import Manager, Optimizer, ProcessGroupGloo

    host = os.environ.get("POD_IP", "localhost")
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    data = torch.load(options.folder / "digits.pt")
    model, plain = build(options.state, torch.device("cpu"))
    checkpoint = Checkpoint(options.folder, options.save_seconds, torch.device("cpu"))

    def restore(saved):
        model.load_state_dict(saved["model"])
        plain.load_state_dict(saved["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=options.timeout)), min_replica_size=1, load_state_dict=restore,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()}, hostname=host,
        rank=0, world_size=1, store_addr=host, store_port=store.port, replica_id=os.environ["DDPJOB_POD"],
    )  # fmt: skip
    if step := checkpoint.load(model, plain):
        manager.load_state_dict({"step": step, "batches_committed": step})
    parallel, optimizer = Parallel(manager, model), Optimizer(manager, plain)
    work, log = idle(options.step, torch.device("cpu")), Log(options.folder)
    while True:
        before = manager.current_step()
        optimizer.zero_grad()
        images, labels = batch(data, before, 0, 1, options.batch)
        loss = nn.functional.cross_entropy(parallel(images), labels)
        work()
        loss.backward()
        optimizer.step()
        step = manager.current_step()
        rank = manager.participating_rank()
        if step == before or rank is None:
            continue  # The step was discarded, or this replica has only received the state.
        if rank == 0:
            checkpoint.save(step, model, plain)
        # The number of participating ranks changes within a quorum, because a healing replica
        # counts one step later.
        log.step(step, manager._quorum_id, int(os.environ["DDPJOB_INDEX"]), manager.num_participants())


def main():
    options = arguments()
    torch.set_num_threads(1)
    (train_with_torchft if options.torchft else train)(options)


if __name__ == "__main__":
    main()

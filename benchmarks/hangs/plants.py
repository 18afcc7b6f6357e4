"""A plain training script in which one rank hangs once, in a way that is chosen by name.

    torchrun ... plants.py FOLDER KIND [--rank N] [--after SECONDS] [--steps N]

Each step sums over all ranks and takes an optimizer step, because optimizer steps are counted.
After `--after` seconds of training, the rank calls the function `hang_KIND`, which never returns. A
file in FOLDER records the hang, so that the next incarnation does not hang.
"""

import argparse
import asyncio
import contextlib
import ctypes
import fcntl
import multiprocessing
import os
import queue
import select
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

CLONE, CLONE_VFORK = 56, 0x4000
"""A system call number and a flag of Linux on x86-64."""


class Stuck(torch.utils.data.Dataset):
    """Samples that the loader's process never delivers."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()


class StoppedLoader(Stuck):
    """Samples whose loader process stops."""

    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGSTOP)


def hang_loader(folder):
    next(iter(torch.utils.data.DataLoader(Stuck(), num_workers=1)))


def hang_stopped_loader(folder):
    next(iter(torch.utils.data.DataLoader(StoppedLoader(), num_workers=1)))


def hang_lock(folder):
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def hang_skips_collective(folder):
    dist.recv(torch.zeros(1), src=0)


def hang_file_server(folder):
    pipe = folder / f"server-{os.getpid()}"
    os.mkfifo(pipe)
    pipe.open()


def hang_uninterruptible(folder):
    # The parent waits in the kernel (state D) until the child has ended.
    if ctypes.CDLL(None).syscall(CLONE, CLONE_VFORK | int(signal.SIGCHLD), 0, 0, 0, 0) == 0:
        while True:
            signal.pause()


def hang_gil(folder):
    mutex, library = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def hang_stopped(folder):
    os.kill(os.getpid(), signal.SIGSTOP)


def hang_queue(folder):
    queue.Queue().get()


def hang_thread(folder):
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()
    thread.join()


def hang_program(folder):
    subprocess.run(["cat"], stdin=open_pipe(), check=False)


def hang_server(folder):
    server = socket.create_server(("127.0.0.1", 0))
    socket.create_connection(server.getsockname()).recv(1)


def hang_pipe(folder):
    os.read(open_pipe(), 1)


def hang_file_lock(folder):
    with (folder / f"lock-{os.getpid()}").open("w") as first, (folder / f"lock-{os.getpid()}").open("w") as second:
        fcntl.flock(first, fcntl.LOCK_EX)
        fcntl.flock(second, fcntl.LOCK_EX)


def hang_pool(folder):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.map(wait_for_ever, [0])


def hang_condition(folder):
    condition = threading.Condition()
    with condition:
        condition.wait()


def hang_event_loop(folder):
    async def wait():
        await asyncio.Event().wait()

    asyncio.run(wait())


def hang_store(folder):
    dist.distributed_c10d._get_default_store().get("a key that nobody sets")


def hang_select(folder):
    select.select([open_pipe()], [], [])


def hang_marker(folder):
    while not (folder / "a file that nobody writes").exists():
        time.sleep(0.05)


def hang_signal(folder):
    signal.sigwait([signal.SIGUSR2])


def hang_semaphore(folder):
    multiprocessing.Semaphore(0).acquire()


def hang_hook(folder):
    weights = torch.ones(1, requires_grad=True)
    weights.register_hook(lambda gradient: threading.Event().wait())
    weights.sum().backward()


def hang_child(folder):
    if (child := os.fork()) == 0:
        signal.pause()
    os.waitpid(child, 0)


def hang_everywhere(folder):
    threading.Event().wait()


def hang_barrier(folder):
    dist.monitored_barrier(dist.new_group([0, 1], backend="gloo", use_local_synchronization=True))


def wait_for_ever(item):
    threading.Event().wait()


def open_pipe():
    """Return the reading end of a pipe whose other end stays open and writes nothing."""
    return os.pipe()[0]


KINDS = sorted(name.removeprefix("hang_") for name in globals() if name.startswith("hang_"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("kind", choices=[*KINDS, "none"])
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--after", type=float, default=15.0)
    parser.add_argument("--steps", type=int, default=10**9)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, step, began = dist.get_rank(), 0, time.monotonic()
    weights = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weights], lr=0.1)
    planted = options.folder / f"planted-{rank}"
    while step < options.steps:
        due = time.monotonic() - began > options.after
        if due and options.kind != "none" and (rank == options.rank or options.kind == "everywhere"):
            with contextlib.suppress(FileExistsError):
                planted.touch(exist_ok=False)
                globals()[f"hang_{options.kind}"](options.folder)
        dist.all_reduce(torch.ones(1))
        weights.grad = torch.ones(1)
        optimizer.step()
        step += 1
        if rank == 0:
            (options.folder / "step").write_text(f"{step} {time.time()}")
        time.sleep(0.05)


if __name__ == "__main__":
    main()

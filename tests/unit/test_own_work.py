"""In any script, a rank's own work is measured without its waits, and the cost of a slow rank is
computed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ddpjob_pod import own_work
from ddpjob_pod.own_work import Lookout, WorkClock, count_tail, count_waits, read_seconds
from torch import distributed, nn

SLEEP = 0.1
"""Seconds that a normal rank sleeps at each step."""
WORLD = 3


def sleeping(model: nn.Module, seconds: float) -> nn.Module:
    model.register_forward_hook(lambda *_: time.sleep(seconds))
    return model


def by_ddp(seconds: float) -> nn.Module:
    return nn.parallel.DistributedDataParallel(sleeping(nn.Linear(8, 8), seconds))


def by_hand(seconds: float) -> nn.Module:
    """Exchange gradients with collectives that block, as FSDP does."""
    model = sleeping(nn.Linear(8, 8), seconds)
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(lambda weight: distributed.all_reduce(weight.grad))
    return model


LOOPS = {"ddp": by_ddp, "by hand": by_hand}


def train(kind: str, rank: int, folder: Path) -> None:
    """Train as a user's script would, until rank 1 is reported. Rank 0 saves a checkpoint every
    tenth step.
    """
    os.environ |= {"WORLD_SIZE": str(WORLD), "RANK": str(rank)}
    said, step, stop = folder / "said", 0, torch.zeros(1)
    own_work.LOOK_SECONDS, own_work.SECONDS, own_work.FACTOR = 0.5, 1.0, 2.0
    own_work.begin(lambda entries: said.write_text(json.dumps(entries)))
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
    torch.set_num_threads(1)
    model = LOOPS[kind](SLEEP * (4 if rank == 1 else 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    while not stop and step < 200:
        step += 1
        time.sleep(10 * SLEEP * (rank == 0 and step % 10 == 9))
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        stop += rank == 0 and said.exists()
        distributed.all_reduce(stop)
    distributed.destroy_process_group()


@pytest.mark.parametrize("kind", LOOPS)
def test_only_the_lagging_rank_is_reported(kind: str, tmp_path: Path) -> None:
    """The others wait in the exchange. Rank 0 sleeps longest, but only every tenth step."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=train, args=(kind, rank, tmp_path)) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(200)
    assert [process.exitcode for process in ranks] == [0] * WORLD
    (entry,) = json.loads((tmp_path / "said").read_text())
    assert entry["rank"] == 1 and 2 <= entry["slowdown"] <= 5 and 0.2 < entry["cost"] < 0.9, entry


def clock_of(*steps: tuple[float, float], first: object = None) -> WorkClock:
    """Return a clock that has recorded these steps: seconds of own work and of waiting."""
    clock, optimizer = WorkClock(torch), first or object()
    clock.step_ends(optimizer)
    for own, waiting in steps:
        time.sleep(own)
        began = clock.mark()
        time.sleep(waiting)
        clock.waited(began, clock.mark())
        clock.step_ends(optimizer)
    return clock


def test_an_evaluation_between_steps_does_not_count_as_work_of_a_step() -> None:
    own, step = clock_of((0.01, 0.03), (0.01, 0.03), (1.0, 0.0), (0.01, 0.03), (0.01, 0.03)).take() or (0, 0)
    assert 0.01 <= own < 0.5 and step - own >= 0.03


def test_steps_that_are_too_few_for_a_check_are_kept_for_the_next_one() -> None:
    optimizer = object()
    clock = clock_of((0.01, 0.0), (0.01, 0.0), first=optimizer)
    assert clock.take() is None
    clock.step_ends(optimizer)
    assert clock.take() is not None and clock.take() is None, "each step counts once"


def test_only_steps_of_the_first_optimizer_and_waits_of_training_count() -> None:
    optimizer, other = object(), object()
    clock = clock_of((0.02, 0.0), first=optimizer)
    for _ in range(2):
        clock.step_ends(other)
        time.sleep(0.02)
        clock.step_ends(optimizer)
    elsewhere = threading.Thread(target=lambda: clock.waited(0.0, 100.0))
    elsewhere.start()
    elsewhere.join()
    clock.step_ends(optimizer)
    own, _ = clock.take() or (0, 0)
    assert own >= 0.02, "a wait in a background thread does not count"


def test_the_next_optimizer_is_measured_if_the_first_one_is_no_longer_used() -> None:
    first, second = object(), object()
    clock = clock_of((0.0, 0.0), first=first)
    for _ in range(own_work._LEFT + 5):
        clock.waited(clock.mark(), clock.mark())
        clock.step_ends(second)
    assert len(clock._unread) == 1 + 5 and clock._waits == []


def test_many_optimizers_of_one_step_do_not_replace_the_first_one() -> None:
    """Some scripts have an optimizer for each parameter."""
    first, others = object(), [object() for _ in range(2 * own_work._LEFT)]
    clock = clock_of(first=first)
    for step in range(2 * own_work._LEFT):
        for optimizer in (*others, first):
            clock.step_ends(optimizer)
        assert len(clock._unread) == min(step + 1, own_work._UNREAD)


def test_a_step_with_too_many_waits_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_work, "_MOST_WAITS", 10)
    optimizer = object()
    clock = clock_of((0.0, 0.0), first=optimizer)
    for _ in range(25):
        clock.waited(clock.mark(), clock.mark())
        assert len(clock._waits) <= 10
    for measured in (1, 2):
        clock.step_ends(optimizer)
        assert len(clock._unread) == measured


def test_a_wait_at_the_end_of_a_backward_pass_counts_as_waiting() -> None:
    clock = WorkClock(torch)
    backward = count_tail(torch.autograd.backward, clock, torch)
    optimizer, weight = object(), torch.ones(1, requires_grad=True)
    queue = torch.autograd.Variable._execution_engine.queue_callback  # type: ignore[attr-defined]
    clock.step_ends(optimizer)
    for _ in range(3):
        loss = (weight * 2).sum()
        weight_hook = weight.register_hook(lambda _: queue(lambda: time.sleep(0.05)))  # as DDP does
        time.sleep(0.02)
        backward(loss)
        weight_hook.remove()
        clock.step_ends(optimizer)
    own, step = clock.take() or (0, 0)
    assert own >= 0.02 and step - own >= 0.05 and weight.grad is not None and float(weight.grad) == 6
    backward((weight * 1).sum(), inputs=[weight])
    with pytest.raises(RuntimeError, match="does not require grad"):
        backward(torch.ones(1))


class Event:
    """A stand-in for a GPU's event, because this suite has no GPU."""

    done = True

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return Event.done

    def elapsed_time(self, other: Event) -> float:
        return 1000 * (other.at - self.at)


def test_gpu_events_are_read_once_they_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, optimizer = WorkClock(torch), object()
    for name, value in (("is_initialized", lambda: True), ("Event", Event)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    wait = count_waits(lambda: time.sleep(0.03), clock)
    clock.step_ends(optimizer)
    for _ in range(3):
        time.sleep(0.01)
        wait()
        clock.step_ends(optimizer)
    Event.done = False
    assert clock.take() is None
    Event.done = True
    own, step = clock.take() or (0, 0)
    assert own >= 0.01 and step - own >= 0.03


class Store:
    """The group's store, as a dictionary."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.values[key] for key in keys]


def said_by(owns: Callable[[float, int], float], step: float, seconds: float, world: int = 4) -> list[list[Any]]:
    """Check every 5 s for `seconds`, and return rank 0's reports. A rank's own work takes
    `owns(time, rank)`.
    """
    said: list[list[Any]] = []
    store, lookout, now = Store(), Lookout(said.append, clock=lambda: now), 0.0

    class Known:
        def __init__(self, own: float) -> None:
            self.own = own

        def take(self) -> tuple[float, float]:
            return self.own, step

    while now < seconds:
        for rank in (*range(1, world), 0):
            lookout.look(Known(owns(now, rank)), store, rank, world)  # type: ignore[arg-type]
        now += 5
    return said


def test_a_slow_rank_is_reported_after_half_a_minute_with_its_cost() -> None:
    ((entry,), *_) = said_by(lambda now, rank: 0.2 if rank == 2 else 0.1, 0.21, 45)
    assert entry["rank"] == 2 and entry["slowdown"] == 2.0 and 0.4 < entry["cost"] < 0.5
    assert said_by(lambda now, rank: 0.2 if rank == 2 else 0.1, 0.21, 25) == [], "slowness counts only if it persists"


@pytest.mark.parametrize(
    ("owns", "step"),
    [
        (lambda now, rank: 0.1 if now < 60 else 0.2, 0.21),
        (lambda now, rank: 0.3 if rank == 1 and 60 <= now < 75 else 0.1, 0.31),
        (lambda now, rank: 0.105 if rank == 1 else 0.1, 0.12),
        (lambda now, rank: 0.3 if rank == now // 5 % 4 else 0.1, 0.31),
    ],
    ids=["all are slow together", "a short load of another process", "one additional sample", "each in turn"],
)
def test_a_rank_that_is_not_slow_is_not_reported(owns: Callable[[float, int], float], step: float) -> None:
    assert said_by(owns, step, 300) == []


@pytest.mark.parametrize(
    ("slow", "fast", "step"),
    [(0.02, 0.01, 1.0), (0.0008, 0.0004, 0.001)],
    ids=["steps are mostly exchange", "tiny steps"],
)
def test_a_slow_rank_that_hardly_delays_the_steps_is_reported_with_a_low_cost(
    slow: float, fast: float, step: float
) -> None:
    said = said_by(lambda now, rank: slow if rank == 2 else fast, step, 60)
    assert said and all(entry["cost"] < 0.05 for entries in said for entry in entries)


def test_the_report_of_a_rank_that_recovers_is_withdrawn() -> None:
    said = said_by(lambda now, rank: 0.2 if rank == 2 and now < 100 else 0.1, 0.21, 300)
    assert said[0] and said[-1] == []


def test_measurements_that_are_not_finite_are_unknown() -> None:
    assert read_seconds([b"0.5", b"x", b"", b"nan", b"-1", b"inf"]) == [0.5, 0, 0, 0, 0, 0]


def test_the_hook_leaves_other_hooks_of_the_same_module_alone(tmp_path: Path) -> None:
    """The step counter of rank 0 waits for the same import."""
    package = tmp_path / "torch" / "optim"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "optimizer.py").write_text("def register_optimizer_step_post_hook(hook): print('measures')\n")
    program = (
        "from ddpjob_runtime import worker\n"
        "from ddpjob_pod import own_work\n"
        "worker.after_import('torch.optim.optimizer', lambda module: print('counts'))\n"
        "own_work.begin(print)\n"
        "import torch.optim.optimizer\n"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(own_work.__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path, "WORLD_SIZE": "2"}
    printed = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
    )
    assert sorted(printed.stdout.split()) == ["counts", "measures"]
    alone = subprocess.run(
        [sys.executable, "-c", program],
        env={**environment, "WORLD_SIZE": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert alone.stdout.split() == ["counts"]
    forked = (
        "import torch.optim.optimizer\n"
        "from ddpjob_runtime.launcher.late_environment import hide_torch\n"
        "from ddpjob_pod import own_work\n"
        "hide_torch([])\n"
        "own_work.begin(print)\n"
        "import torch\n"
    )
    printed = subprocess.run(
        [sys.executable, "-c", forked], env=environment, check=True, capture_output=True, text=True
    )
    assert printed.stdout.split() == ["measures"], "in a forked worker, torch has been imported already"

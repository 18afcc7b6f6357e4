"""Snapshots in the nodes' memory: which steps a restart repeats, and that its results are the
same.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ddpjob_pod import rank_snapshots
from ddpjob_pod.snapshot_store import SnapshotStore
from ddpjob_trainer.checkpoints import dcp, torch_file
from ranks import TINY, final_losses, good, metrics, run

TRAINING = [*TINY, "checkpoint.every_seconds=1000000", "checkpoint.keep_best=0"]


@pytest.fixture
def nodes() -> Iterator[Callable[[int], Path]]:
    """Yield a function that returns a node's folder in memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:

        def folder(node: int) -> Path:
            made = Path(place, str(node))
            made.mkdir(exist_ok=True)
            return made

        yield folder


def on_nodes(folder: Callable[[int], Path], round_: int, every: str = "1") -> Callable[[int], dict[str, str]]:
    """Treat each rank as a node."""

    def env(rank: int) -> dict[str, str]:
        return {
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "DDPJOB_FENCE": f"0.{round_}",
            "DDPJOB_SNAPSHOT_FOLDER": str(folder(rank)),
            "DDPJOB_SNAPSHOT_STEPS": every,
        }

    return env


def dies_in(step: int) -> Callable[[int], None]:
    """Kill all ranks while step number `step` runs."""

    def prepare(rank: int) -> None:
        from ddpjob_trainer.reporting.ledger import Ledger

        write = Ledger.step

        def step_or_die(self: Ledger, number: int, taken: object) -> None:
            if number == step:
                os._exit(9)
            write(self, number, taken)  # type: ignore[arg-type]

        Ledger.step = step_or_die  # type: ignore[method-assign,assignment]

    return prepare


def test_the_automatic_interval_ignores_the_cost_of_the_first_copies(
    nodes: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first copies reserve memory and connect the ranks, which may take a hundred times as long
    as a later copy.
    """
    clock = [0.0]

    def now() -> float:
        return clock[0]

    monkeypatch.setattr(rank_snapshots, "time", SimpleNamespace(perf_counter=now, thread_time=now))
    kept = rank_snapshots.RankSnapshots(
        SnapshotStore(nodes(0)), rank_snapshots.TorchExchange(0, 1), (0, 1), rank_snapshots.AUTO
    )
    kept.begin(0, "scratch")
    intervals = list[int]()
    for step in range(1, 11):
        clock[0] += 0.05

        def make(step: int = step) -> dict[str, int]:
            clock[0] += 0.05 if step <= 2 else 0.0009
            return {"step": step}

        kept.take(step, make)
        intervals.append(kept.interval)
    assert intervals == [1, 1, 1, 2, 2, 2, 2, 2, 2, 2]


def last_state(folder: Path) -> dict[str, object]:
    path = max(folder.glob("step-*"))
    return dict(dcp.read(path) if path.suffix == dcp.SUFFIX else torch_file.read(path))


def same(left: object, right: object) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and torch.equal(left, right)
    if isinstance(left, dict):
        return isinstance(right, dict) and left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    return left == right


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "parameter_server"])
def test_a_restart_without_any_checkpoint_repeats_no_complete_step(
    strategy: str, tmp_path: Path, nodes: Callable[[int], Path]
) -> None:
    # Without ddp.ordered, a new process uses different gradient buckets in its first step.
    order = ["ddp.ordered=true"] if strategy == "ddp" else []
    arguments = [*TRAINING, f"strategy={strategy}", *order]
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    good(3, [*arguments, f"checkpoint.dir={undisturbed}"])
    arguments = [*arguments, f"checkpoint.dir={disturbed}"]
    for round_, (step, lost) in enumerate([(4, 0), (9, 1), (13, 2)]):
        ends = run(3, arguments, dies_in(step), on_nodes(nodes, round_))
        assert [end.code for end in ends] == [9] * 3
        shutil.rmtree(nodes(lost))
    good(3, arguments, env=on_nodes(nodes, 3))
    assert [row["step"] for row in metrics(disturbed / "run", "start")] == [0, 3, 8, 12]
    assert final_losses(disturbed / "run") == final_losses(undisturbed / "run")
    for part in ("model", "optimizer", "sampler"):
        assert same(last_state(disturbed)[part], last_state(undisturbed)[part])


def test_a_smaller_or_larger_group_continues_from_sharded_states_in_memory(
    tmp_path: Path, nodes: Callable[[int], Path]
) -> None:
    arguments = [*TRAINING, "strategy=fsdp", "optim.name=adamw"]
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    good(3, [*arguments, f"checkpoint.dir={undisturbed}"])
    arguments += [f"checkpoint.dir={disturbed}"]
    for round_, (world, step, lost) in enumerate([(3, 4, 2), (2, 9, 1)]):
        ends = run(world, arguments, dies_in(step), on_nodes(nodes, round_))
        assert [end.code for end in ends] == [9] * world
        shutil.rmtree(nodes(lost))
    good(3, arguments, env=on_nodes(nodes, 2))
    assert [row["step"] for row in metrics(disturbed / "run", "start")] == [0, 3, 8]
    for part in ("model", "optimizer"):  # a sum over two ranks has other rounding errors than one over three
        torch.testing.assert_close(last_state(disturbed)[part], last_state(undisturbed)[part], rtol=1e-3, atol=1e-5)
    assert last_state(disturbed)["sampler"] == last_state(undisturbed)["sampler"]

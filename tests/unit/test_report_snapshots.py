"""`ddpjob_report.Snapshots` in scripts: the state that a restart restores, and the error for each
incorrect use.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch._dynamo")  # done once here, so that not every rank does it in its first optimizer step

import torch.distributed as dist  # noqa: E402
from ddpjob_report import Snapshots, link, node_memory  # noqa: E402
from ddpjob_runtime import protocol  # noqa: E402
from machine import free_port, slowness  # noqa: E402
from torch import nn  # noqa: E402

STEPS = 8


@pytest.fixture
def memory() -> Iterator[Path]:
    """Yield a folder in memory that contains the nodes' folders."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        yield Path(place)


def environment(folder: Path, round_: int) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    return {
        "DDPJOB_FENCE": f"0.{round_}",
        "DDPJOB_SNAPSHOT_FOLDER": str(folder),
        "DDPJOB_SNAPSHOT_STEPS": "1",
    }


class Counter:
    """A data loader that saves its position. Each rank has its own loader."""

    def __init__(self, rank: int) -> None:
        self.drawn = rank * 1000

    def batch(self) -> torch.Tensor:
        self.drawn += 1
        return torch.linspace(-1, 1, 8).unsqueeze(1) * (self.drawn % 7 + 1)

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.drawn = state["drawn"]


def training(rank: int, until: int, *, accumulate: int = 1) -> tuple[int, list[float]]:
    """Train with every kind of object that has a state, and return the first step and the final
    weights.
    """
    torch.manual_seed(rank)
    loader, group = Counter(rank), dist.is_initialized()
    model: Any = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))
    average = torch.optim.swa_utils.AveragedModel(model)
    model = nn.parallel.DistributedDataParallel(model) if group else model
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    kept = Snapshots(
        model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, loader=loader, average=average
    )
    for step in range(kept.step, STEPS):
        for _ in range(accumulate):
            batch = loader.batch()
            scaler.scale((model(batch) - 3 * batch).square().mean()).backward()
            kept.take(step)  # the previous step again, which must not count twice
        if step == until:
            os._exit(9)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
        average.update_parameters(model)
        kept.take(step + 1)
    state = [*model.state_dict().values(), *average.state_dict().values()]
    return kept.step, [float(x) for value in state for x in value.double().flatten()] + [float(loader.drawn)]


def ranks(
    world: int, local: int, memory: Path, round_: int, work: Callable[[int], Any], *, group: bool = True
) -> list[Any]:
    """Run `work` on forked ranks over gloo, `local` ranks per node, and return their results. The
    result of a rank that died is None.

    If `group` is true, they already have a process group.
    """
    context, meeting, port = multiprocessing.get_context("fork"), memory / f"meet-{round_}", free_port()

    def run(rank: int, send: Any) -> None:
        os.environ.update(environment(memory / f"node-{rank // local}", round_))
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank % local))
        os.environ.update(LOCAL_WORLD_SIZE=str(local), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        torch.set_num_threads(1)
        try:
            if group and world > 1:
                dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
            send.send(work(rank))
        except BaseException as error:
            traceback.print_exc()
            send.send(error)
        os._exit(0)

    started = []
    for rank in range(world):
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=run, args=(rank, send))
        process.start()
        send.close()
        started.append((process, receive))
    results = []
    for process, receive in started:
        assert receive.poll(60 * slowness()), "a rank neither ended nor answered"
        try:
            results.append(receive.recv())
        except EOFError:
            results.append(None)
        process.join()
    return results


@pytest.mark.parametrize(("world", "local", "accumulate"), [(2, 1, 1), (2, 2, 1), (1, 1, 2)])
def test_a_restarted_run_continues_after_the_last_step_with_the_same_results(
    world: int, local: int, accumulate: int, memory: Path
) -> None:
    """The state covers weights, moments, learning rate, scale, dropout, statistics, average, and
    each rank's position in the data.
    """
    undisturbed = memory / "undisturbed"
    undisturbed.mkdir()
    wanted = ranks(world, local, undisturbed, 0, lambda rank: training(rank, -1, accumulate=accumulate))
    for round_, dies in enumerate((3, 6)):
        assert ranks(world, local, memory, round_, lambda r, at=dies: training(r, at, accumulate=accumulate)) == (
            [None] * world
        )
        if local < world:
            shutil.rmtree(memory / f"node-{round_}")
    last = ranks(world, local, memory, 2, lambda rank: training(rank, -1, accumulate=accumulate))
    assert [first for first, _ in last] == [6] * world
    assert [weights for _, weights in last] == [weights for _, weights in wanted]


class Keeper(nn.Linear):
    """A module that keeps the loaded tensor itself, as quantized modules do."""

    def get_extra_state(self) -> torch.Tensor:
        return self.given if hasattr(self, "given") else torch.full((3,), 5.0)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.given = state


def test_restored_tensors_do_not_share_memory_with_the_snapshot(job: Callable[[], None], memory: Path) -> None:
    """Otherwise, the next snapshot would overwrite them."""

    def objects() -> tuple[Any, Any]:
        torch.manual_seed(1)
        model = nn.Sequential(Keeper(4, 2), nn.BatchNorm1d(2))
        return model, torch.optim.Adam(model.parameters())

    job()
    model, optimizer = objects()
    kept = Snapshots(model=model, optimizer=optimizer)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    kept.take(1)
    wanted = model.state_dict(), optimizer.state_dict()
    del kept
    model, optimizer = objects()
    assert Snapshots(model=model, optimizer=optimizer).step == 1
    for slot in memory.rglob("all.*"):
        with slot.open("r+b") as file:
            file.write(b"\xff" * slot.stat().st_size)
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), wanted, rtol=0, atol=0)


def test_the_number_of_ranks_may_change_between_snapshot_and_restart(memory: Path) -> None:
    """A job with one rank has no DDP, which adds a prefix to parameter names. A new rank uses rank
    0's schedulers and loaders.
    """

    def work(until: int) -> Callable[[int], tuple[int, float]]:
        def train(rank: int) -> tuple[int, float]:
            first, numbers = training(rank, until)
            return first, numbers[-1] - STEPS

        return train

    assert ranks(2, 1, memory, 0, work(3)) == [None] * 2
    assert ranks(1, 1, memory, 1, work(5)) == [None]
    assert ranks(2, 1, memory, 2, work(-1)) == [(5, 0.0), (5, 0.0)]


@pytest.fixture
def job(memory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Yield a job of one process. Each call is a restart."""
    rounds = iter(range(100))

    def restart() -> None:
        for name, value in environment(memory / "node", next(rounds)).items():
            monkeypatch.setenv(name, value)

    restart()
    yield restart
    Snapshots._current = None


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = []
    monkeypatch.setattr(link, "post", lambda figures: said.append(figures) if figures else None)
    return said


class Tied(nn.Module):
    """A model with two names for one weight, and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.frozen = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.second(self.first(x)))


@pytest.mark.parametrize("wrapped", ["before", "after", "compiled", "compiled after"])
def test_a_state_is_restored_no_matter_how_the_model_is_wrapped(wrapped: str, job: Callable[[], None]) -> None:
    """This includes tied and frozen weights, and an optimizer that has no state yet."""

    def begin(how: str) -> tuple[Tied, torch.optim.Optimizer, Snapshots]:
        model = Tied()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        given: Any = torch.compile(model, backend="eager") if how == "compiled" else model
        kept = Snapshots(model=given, optimizer=optimizer)
        if how == "compiled after":
            torch.compile(model, backend="eager")
        return model, optimizer, kept

    model, optimizer, kept = begin("before")
    kept.take(1)
    optimizer.zero_grad()
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    kept.take(2)
    del kept
    job()
    again, other, restored = begin(wrapped)
    assert restored.restored and restored.step == 2
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    assert again.second.weight is again.first.weight
    momenta = [[state["momentum_buffer"] for state in o.state.values()] for o in (optimizer, other)]
    assert all(torch.equal(a, b) for a, b in zip(*momenta, strict=True))


def line() -> nn.Module:
    return nn.Linear(1, 1)


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(
    ("steps", "kind", "said"),
    [
        (
            [1, 2, 1],
            ValueError,
            r"take\(1\): the step must not decrease, but the last one was 2; count the steps since",
        ),
        ([1.5], TypeError, r"take\(1.5\): must be the number of steps completed so far, at least 0"),
        ([True], TypeError, r"take\(True\)"),
        ([-1], TypeError, r"take\(-1\)"),
    ],
)
@pytest.mark.parametrize("inside", [True, False])
def test_a_wrong_step_is_refused_inside_of_a_job_and_outside(
    steps: list[Any], kind: type[Exception], said: str, inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not inside:
        monkeypatch.delenv("DDPJOB_SNAPSHOT_FOLDER")
    kept = Snapshots(model=line())
    for step in steps[:-1]:
        kept.take(step)
    with pytest.raises(kind, match=said):
        kept.take(steps[-1])
    kept.take(torch.tensor(5))  # an integer of a different type


def test_a_loop_that_ignores_the_restored_step_is_refused(job: Callable[[], None]) -> None:
    kept = Snapshots(model=line())
    kept.take(7)
    del kept
    job()
    kept = Snapshots(model=line())
    with pytest.raises(
        ValueError, match=r"take\(1\): training continues from step 7, which was restored from memory; start the loop"
    ):
        kept.take(1)


@pytest.mark.parametrize(
    ("restored", "own", "first", "start"),
    [
        (0, None, 1, {"step": 0, "source": protocol.SCRATCH}),
        (0, None, 31, {"step": 30, "source": protocol.STORAGE}),
        (0, 30, 31, {"step": 30, "source": protocol.STORAGE}),
        (7, None, 8, {"step": 7, "source": protocol.MEMORY}),
        (7, 30, 31, {"step": 30, "source": protocol.STORAGE}),
        (7, 4, 5, {"step": 4, "source": protocol.STORAGE}),
    ],
)
def test_the_report_shows_where_training_continued(
    restored: int,
    own: int | None,
    first: int,
    start: dict[str, Any],
    job: Callable[[], None],
    posted: list[dict[str, Any]],
) -> None:
    """Training continues from memory, from a checkpoint that the script has loaded (at step `own`),
    or from scratch.
    """
    if restored:
        kept = Snapshots(model=line())
        kept.take(restored)
        del kept
        job()
        posted.clear()
    kept = Snapshots(model=line())
    assert (kept.restored, kept.step) == (bool(restored), restored)
    if own is not None:
        kept.step = own
    kept.take(first)
    starts = [figures[protocol.START] for figures in posted if protocol.START in figures]
    assert {name: starts[-1][name] for name in start} == start


class Unsaved:
    """An object whose state cannot be saved."""

    def state_dict(self) -> dict[str, Any]:
        return {"made": lambda: 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Never called."""


class Cyclic(Unsaved):
    """An object whose state contains itself."""

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"made": [0]}
        state["made"].append(state)
        return state


class CyclicModule(nn.Linear, Cyclic):  # type: ignore[misc]
    def state_dict(self) -> dict[str, Any]:
        return Cyclic.state_dict(self)


class ZeroRedundancyOptimizer(torch.optim.SGD):  # type: ignore[misc]
    """A class with the name of torch's class."""


class FullyShardedDataParallel(nn.Linear):  # type: ignore[misc]
    """A class with the name of torch's class."""


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(
    ("use", "kind", "said"),
    [
        (lambda: Snapshots(), TypeError, r"pass objects by name, as in Snapshots\(model=model, optimizer=optimizer\)"),
        (lambda: Snapshots(line()), TypeError, "pass objects by name"),
        (
            lambda: Snapshots(model=line(), steps=3),
            TypeError,
            "steps must have state_dict.*a int does not; leave it out",
        ),
        (
            lambda: Snapshots(model=line(), data=torch.utils.data.DataLoader([1])),
            TypeError,
            "data must have .* a DataLoader does not; skip the first batches yourself, or use torchdata's",
        ),
        (
            lambda: Snapshots(model=line(), odd=Unsaved()).take(1),
            TypeError,
            r"state_dict\(\) of odd contains a value that cannot be pickled .*leave odd out",
        ),
        (
            lambda: Snapshots(model=line(), odd=Cyclic()).take(1),
            TypeError,
            r"odd: the state contains itself at state\['made'\]\[1\]; leave that key out",
        ),
        (
            lambda: Snapshots(model=CyclicModule(1, 1)).take(1),
            TypeError,
            r"the state contains itself at state\['model'\]\['made'\]\[1\]; leave that key out",
        ),
        (
            lambda: Snapshots(optimizer=ZeroRedundancyOptimizer(line().parameters(), lr=0.1)),
            TypeError,
            r"optimizer is sharded over the ranks \(ZeRO\).*save it with torch.distributed.checkpoint",
        ),
        (
            lambda: Snapshots(model=nn.Sequential(FullyShardedDataParallel(1, 1))),
            TypeError,
            r"model is sharded over the ranks \(FSDP\)",
        ),
        (
            lambda: (Snapshots(model=line()), Snapshots(model=line())),
            RuntimeError,
            "an instance already exists, and both would write to the same memory; pass all objects to one instance",
        ),
    ],
)
def test_incorrect_use_is_reported_with_the_remedy(use: Callable[[], Any], kind: type[Exception], said: str) -> None:
    first = Snapshots(model=line()) if "an instance already exists" in said else None
    with pytest.raises(kind, match=said):
        use()
    del first


def test_a_model_that_is_sharded_after_its_registration_is_refused(job: Callable[[], None]) -> None:
    model = nn.Sequential(line())
    kept = Snapshots(model=model)
    model[0] = FullyShardedDataParallel(1, 1)
    with pytest.raises(TypeError, match="model is sharded"):
        kept.take(1)


@pytest.mark.parametrize(
    ("objects", "said"),
    [
        (
            {"net": line()},
            "memory contains the state of model, but not of net; pass the same objects as before the restart",
        ),
        ({"model": nn.Linear(2, 2)}, "does not fit model: .*size mismatch.*or set recovery.snapshots: none"),
    ],
)
def test_objects_that_have_changed_since_the_snapshot_are_reported(
    objects: dict[str, Any], said: str, job: Callable[[], None]
) -> None:
    kept = Snapshots(model=line())
    kept.take(1)
    del kept
    job()
    with pytest.raises(ValueError, match=f"(?s){said}"):
        Snapshots(**objects)


@pytest.mark.usefixtures("job")
def test_several_ranks_need_a_process_group_for_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"no process group yet; call torch.distributed.init_process_group\(\)"):
        Snapshots(model=line())


def test_ranks_that_register_different_objects_are_refused(memory: Path) -> None:
    def work(rank: int) -> str:
        with pytest.raises(ValueError) as caught:
            Snapshots(model=line(), **({"average": line()} if rank == 0 else {}))
        return str(caught.value)

    told = "ddpjob_report.Snapshots: all ranks must pass the same names, but they pass average, model or model"
    assert [said.split(";")[0] for said in ranks(2, 2, memory, 0, work)] == [told] * 2


def framework(last: int, checkpoint: int = 0) -> Callable[[int], tuple[int, str, str]]:
    """Train like a framework that forms its process group after the script has asked for a
    checkpoint.
    """

    def write(path: Path, found: Any) -> None:
        path.write_text(found.tree["text"])

    def run(rank: int) -> tuple[int, str, str]:
        path = node_memory.as_checkpoint(checkpoint, "step={step}.txt", write)
        said = "" if path is None else f"{path.parent.parent.name} {path.name} {path.read_text()}"
        first = int(path.stem.partition("=")[2]) if path is not None else checkpoint
        assert not dist.is_initialized()
        dist.init_process_group("gloo")
        memory = node_memory.FrameworkMemory.begin(first)
        assert memory is not None
        own = memory.own.decode()
        dist.barrier()
        memory.forget()
        assert path is None or int(os.environ["LOCAL_RANK"]) or not path.parent.exists()
        for step in range(first, last):
            memory.take(step + 1, lambda at=step: {"text": f"after {at + 1}"}, lambda: f"of rank {rank}".encode())
        dist.barrier()
        return first, said, own

    return run


def test_a_framework_without_a_group_yet_gets_the_state_in_memory_as_a_checkpoint(memory: Path) -> None:
    """Each node, even one without a state, writes a checkpoint for its ranks and deletes it after
    use.
    """
    assert ranks(4, 2, memory, 0, framework(3), group=False) == [(0, "", "")] * 4
    shutil.rmtree(memory / "node-1")
    again = ranks(4, 2, memory, 1, framework(5, checkpoint=2), group=False)
    assert again == [(3, f"node-{rank // 2} step=3.txt after 3", f"of rank {rank}") for rank in range(4)]
    newer = ranks(2, 2, memory, 2, framework(6, checkpoint=5), group=False)
    assert newer == [(5, "", "")] * 2, "a checkpoint of the same step serves as well"


@pytest.mark.parametrize("without", [0, 1])
def test_pods_with_different_specs_agree_when_a_framework_starts(memory: Path, without: int) -> None:
    """The pod without a folder started before or after a change to recovery.snapshots. Rank 0's pod
    decides.
    """

    def run(last: int) -> Callable[[int], Any]:
        def of_rank(rank: int) -> Any:
            if rank == without:
                os.environ.update(DDPJOB_SNAPSHOT_FOLDER="", DDPJOB_COORDINATOR="j:1")
            path = node_memory.as_checkpoint(0, "step={step}.txt", lambda path, found: path.write_text("x"))
            dist.init_process_group("gloo")
            training = node_memory.FrameworkMemory.begin(0 if path is None else int(path.stem[5:]))
            for step in range(last if training else 0):
                training.take(step + 1, dict, lambda: b"")
            dist.barrier()
            return training is not None, path is not None and path.parent.parent == memory / f"node-{rank}"

        return of_rank

    assert ranks(2, 1, memory, 0, run(3), group=False) == [(without == 1, False)] * 2
    again = ranks(2, 1, memory, 1, run(0), group=False)
    assert again == ([(True, True), (True, False)] if without == 1 else [(False, False)] * 2)


def test_a_checkpoint_without_room_in_memory_is_written_to_the_temporary_folder(
    job: Callable[[], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Snapshots(model=line()).take(4)
    job()
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=100))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = node_memory.as_checkpoint(3, "step={step}", lambda path, found: path.touch())
    assert path is not None and path.parent.parent == tmp_path and path.name == "step=4"
    training = node_memory.FrameworkMemory.begin(4)
    assert training is not None
    training.forget()
    assert not any(tmp_path.iterdir())


def test_outside_of_a_job_no_snapshots_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DDPJOB_SNAPSHOT_FOLDER", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    kept = Snapshots(model=line())
    kept.take(1)
    assert (kept.step, kept.restored) == (0, False)

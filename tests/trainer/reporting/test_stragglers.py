"""A rank's own work is distinguished from its waiting for others. A lagging rank is reported once
in each place.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
import torch.distributed.pipelining  # this takes seconds, so import it once and not in each rank
from ddpjob_pod.stragglers import NAMED, Straggler, Stragglers
from ddpjob_runtime import protocol
from ddpjob_runtime.coordinator import progress
from ddpjob_trainer import config, train
from ddpjob_trainer.distributed import step_clock
from ddpjob_trainer.distributed.step_clock import StepClock, StepPhase
from ddpjob_trainer.reporting import flops
from ddpjob_trainer.reporting.progress_client import ProgressClient
from ddpjob_trainer.reporting.reporter import Machines
from ddpjob_trainer.strategies.registry import computes_on
from machine import slowness
from ranks import TINY, good, metrics
from torch import nn

LATE = 0.1
"""Delay in seconds."""


def slow(rank: int, where: str) -> Callable[[int], None]:
    """Return a hook for `good` that makes this rank sleep before, during or after its own work."""

    def prepare(own: int) -> None:
        from ddpjob_trainer.optim.precision import Precision

        if own != rank:
            return
        if where == "forward":
            convolve = nn.Conv2d.forward

            def late(self: nn.Conv2d, values: torch.Tensor) -> torch.Tensor:
                time.sleep(LATE * (self.training and self.in_channels == 1))  # in the first convolution only
                return convolve(self, values)

            nn.Conv2d.forward = late  # type: ignore[method-assign]
        elif where == "backward":
            backward = Precision.backward

            def late_backward(self: Precision, loss: torch.Tensor) -> None:
                loss.register_hook(lambda _: time.sleep(LATE))
                backward(self, loss)

            Precision.backward = late_backward  # type: ignore[method-assign]
        else:
            step = Precision.step

            def late_step(self: Precision, *arguments: Any) -> Any:
                time.sleep(LATE)
                return step(self, *arguments)

            Precision.step = late_step  # type: ignore[method-assign]

    return prepare


SYNCHRONIZED = ["model.norm=batch", "model.sync_batchnorm=true"]
SHARED = ["model.norm=batch", "data.micro_batches=3"]
"""Settings under which two ranks share micro-batches."""


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    ("more", "passes"),
    [
        ([], 1),
        (["ddp.ordered=true", "data.micro_batches=4"], 2),
        (["train.accumulate=2"], 2),
        (SYNCHRONIZED, 1),
        (SHARED, 2),
        (["strategy=fsdp"], 1),
    ],
)
def test_a_delay_counts_as_work_of_the_late_rank_and_as_waiting_of_the_others(
    where: str, more: list[str], passes: int, tmp_path: Path
) -> None:
    good(2, [*TINY, "train.epochs=1", *more, f"checkpoint.dir={tmp_path}"], prepare=slow(1, where))
    lines = metrics(tmp_path / "run", "step")[2:]
    own = [sorted(line["ranks"]["ownSeconds"][rank] for line in lines)[len(lines) // 2] for rank in (0, 1)]
    waited = sorted(line["phases"]["exchange"] for line in lines)[len(lines) // 2]
    assert own[1] > passes * LATE and own[1] > own[0] + 0.5 * passes * LATE, own
    assert waited > 0.5 * passes * LATE - own[0], (waited, own)
    assert set(lines[0]["phases"]) == {"data", "forward", "backward", "exchange", "update", "other"}
    assert all(value > 10e6 for line in lines for value in line["ranks"]["memoryBytes"])


@pytest.mark.parametrize("more", [["strategy=fsdp"], SYNCHRONIZED, ["strategy=pipeline"]])
def test_if_waits_cannot_be_observed_no_ranks_own_time_is_known(more: list[str], tmp_path: Path) -> None:
    """Waits on accelerators cannot be observed. A phase that contains waits is not reported as
    waiting for data, even with several micro-batches in a step.
    """

    def blind(rank: int) -> None:
        from ddpjob_trainer.distributed import step_clock

        step_clock._count_waits = lambda: None  # type: ignore[assignment]
        begin = StepClock.__init__

        def as_elsewhere(self: StepClock, device: torch.device) -> None:
            begin(self, device)
            self.sees_waits = False

        StepClock.__init__ = as_elsewhere  # type: ignore[method-assign]
        slow(late, "forward")(rank)

    stages = "strategy=pipeline" in more  # the first stage has the first convolution
    late, portions = (0, "pipeline.micro_batches=2") if stages else (1, "train.accumulate=2")
    keys = [*TINY, "train.epochs=1", portions, *more, f"checkpoint.dir={tmp_path}"]
    good(2, keys, prepare=blind)
    lines = metrics(tmp_path / "run", "step")[2:]
    assert all(line["ranks"]["ownSeconds"] == [0, 0] for line in lines)
    assert set(lines[-1]["phases"]) == {"data", "compute", "update", "other"}
    compute, data = (sorted(line["phases"][name] for line in lines)[len(lines) // 2] for name in ("compute", "data"))
    assert compute > 2 * LATE and data < LATE / 2, (compute, data)
    assert all(max(line["ranks"]["dataWaits"]) < 0.3 for line in lines)


class Event:
    """A stand-in for a GPU's event. Each is recorded one second after the previous one."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self, stream: Any = None) -> None:
        Event.now += 1
        self.at = Event.now

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return 1000 * (other.at - self.at)


def test_waits_of_a_gpus_stream_count_as_exchange_in_any_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(step_clock, "_count_waits_of_streams", lambda: None)
    clock = StepClock(torch.device("cuda"))
    clock.restart()
    clock.lap(StepPhase.DATA)
    before, after = Event(True), Event(True)
    before.record()
    after.record()
    step_clock._in_streams.append((before, after))
    clock.lap(StepPhase.FORWARD)
    clock.lap(StepPhase.BACKWARD)
    expected = {StepPhase.DATA: 1, StepPhase.FORWARD: 2, StepPhase.EXCHANGE: 1, StepPhase.BACKWARD: 1}
    assert clock.take() == expected and clock.sees_waits


def test_the_clock_marks_the_end_of_a_backward_pass_before_dependent_work() -> None:
    """DDP waits in a callback that the engine calls last. Without `watch`, this time would count as
    part of the pass.
    """
    clock, weight = StepClock(torch.device("cpu")), nn.Parameter(torch.ones(3))
    engine = torch.autograd.Variable._execution_engine
    for watched in (True, False):
        handle = weight.register_hook(lambda _: engine.queue_callback(lambda: time.sleep(4 * LATE)))  # type: ignore[no-untyped-call]
        clock.restart()
        loss = weight.square().sum()
        clock.lap(StepPhase.FORWARD)
        if watched:
            clock.watch(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        clock.lap(StepPhase.EXCHANGE)
        handle.remove()
        taken = clock.take()
        assert taken[StepPhase.EXCHANGE] > 4 * LATE
        assert (taken[StepPhase.BACKWARD] < 3 * LATE) if watched else StepPhase.BACKWARD not in taken
    assert clock.take() == {}


# ------------------------------------------------------------ which ranks are reported


def named(found: tuple[Straggler, ...]) -> list[int]:
    return [straggler.rank for straggler in found]


def test_a_slow_rank_is_reported_after_a_while_and_so_is_its_recovery() -> None:
    judge = Stragglers(1.5, 30)
    assert [named(judge.add(now, [1, 1, 1.8, 1])) for now in (0, 10, 20, 29, 30)] == [[], [], [], [], [2]]
    assert named(judge.add(31, [1, 1, 1, 1])) == [2], "one fast report is not enough"
    assert named(judge.add(40, [1, 1, 1.4, 1])) == [2], "between the two limits, nothing changes"
    assert [named(judge.add(now, [1, 1, 1.1, 1])) for now in (50, 60, 70, 80)] == [[2], [2], [2], []]


def test_a_short_or_single_lag_is_ignored() -> None:
    judge = Stragglers(1.5, 30)
    for now in range(0, 1000, 10):
        times = [1.0, 1.0, 1.0, 9.0 if now % 30 == 0 else 1.0]
        assert judge.add(now, times) == ()
    rare = Stragglers(1.5, 30)
    assert [named(rare.add(now, [1, 1, 9])) for now in (0, 100, 200)] == [[], [], [2]], (
        "at least three reports are needed"
    )


def test_the_slower_of_two_ranks_is_found_and_a_single_rank_is_never_slow() -> None:
    judge = Stragglers(1.5, 0)
    assert [named(judge.add(now, [1.0, 2.0])) for now in range(3)][-1] == [1]
    alone = Stragglers(1.5, 0)
    assert [alone.add(now, [1.0]) for now in range(5)] == [()] * 5
    off = Stragglers(0, 0)
    assert [off.add(now, [1.0, 9.0]) for now in range(5)] == [()] * 5
    unknown = Stragglers(1.5, 0)
    assert [unknown.add(now, [0.0, 0.0, 1.0]) for now in range(5)] == [()] * 5


def test_a_pipeline_stage_is_compared_only_with_its_replicas() -> None:
    judge = Stragglers(1.5, 0)
    assert [named(judge.add(now, [1, 9, 1, 9, 2, 9], stages=2)) for now in range(3)][-1] == [4]
    alone = Stragglers(1.5, 0)
    assert [named(alone.add(now, [1, 9, 1], stages=3)) for now in range(5)] == [[]] * 5, (
        "with one replica, there is no rank to compare with"
    )
    mixed = Stragglers(1.5, 0)
    assert [named(mixed.add(now, [1, 9, 0, 27], stages=2)) for now in range(3)][-1] == [3]


def test_a_rank_with_more_or_fewer_samples_is_not_slow() -> None:
    """One rank has two samples and the other one. Passes take the same time for both, or time in
    proportion to the samples.
    """
    for own in ([1.0, 1.0, 1.0], [2.0, 1.0, 1.0]):
        judge = Stragglers(1.5, 0)
        even = [own[0] / 2, own[1], own[2]]
        assert [named(judge.add(now, own, even)) for now in range(5)] == [[]] * 5
    judge = Stragglers(1.5, 0)
    assert [named(judge.add(now, [6.0, 1.0, 1.0], [3.0, 1.0, 1.0])) for now in range(3)][-1] == [0]


def test_only_the_slowest_few_ranks_are_reported_in_order() -> None:
    judge = Stragglers(1.5, 0)
    times = [1.0] * 30 + [2.0 + rank for rank in range(20)]
    for now in range(3):
        found = judge.add(now, times)
    assert named(found) == list(range(49, 49 - NAMED, -1)) and found[0].slowdown == 21.0


def test_every_report_of_a_slow_rank_is_accepted_by_any_coordinator() -> None:
    """The machines are random, with ranks that become slow, recover, and become faster than the
    median.
    """
    dice = random.Random(0)
    most = 0
    for _ in range(50):
        judge, world = Stragglers(dice.choice([1.05, 1.5, 3.0]), dice.choice([0, 3])), dice.randint(2, 20)
        speeds = [1.0] * world
        for now in range(60):
            speeds = [dice.choice([0.3, 1.0, 2.0, 9.0]) if dice.random() < 0.1 else speed for speed in speeds]
            found = judge.add(now, [speed * dice.uniform(0.9, 1.1) for speed in speeds])
            most = max(most, len(found))
            body = [{"rank": straggler.rank, "slowdown": straggler.slowdown} for straggler in found]
            assert protocol.read_stragglers(body) == body, "no lagging rank is left out"
            progress.check({"stragglers": body})
    assert most > 3


@pytest.fixture
def posts() -> Iterator[tuple[int, list[dict[str, Any]], list[int]]]:
    """Serve as a coordinator that keeps the posts it accepts.

    Posts of stragglers are answered with the codes of the list in order, the last one repeatedly. 0
    means no response.
    """
    taken: list[dict[str, Any]] = []
    codes = [200]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            code = 200
            if "stragglers" in body:
                code = codes.pop(0) if len(codes) > 1 else codes[0]
            if code == 200:
                taken.append(body)
            if code:
                self.send_response(code)
                self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server.server_address[1], taken, codes
    server.shutdown()


def recovering(rank: int, after: int) -> Callable[[int], None]:
    """Return a hook for `good` that makes this rank sleep for long in its first `after` forward
    passes. All ranks sleep for long enough that the noise of a busy machine is small in comparison.
    """

    def prepare(own: int) -> None:
        from ddpjob_trainer.model.models import SmallCnn

        forward, passes = SmallCnn.forward, 0

        def late(self: SmallCnn, images: torch.Tensor) -> torch.Tensor:
            nonlocal passes
            if self.training:
                passes += 1
                time.sleep(2 * LATE if own == rank and passes <= after else 0.3 * LATE)
            return forward(self, images)

        SmallCnn.forward = late  # type: ignore[method-assign]

    return prepare


def test_a_lagging_rank_and_its_recovery_are_logged_and_sent_to_the_coordinator(
    posts: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    port, taken, _ = posts
    env = {"DDPJOB_COORDINATOR": f"127.0.0.1:{port}", "DDPJOB_TOKEN": "secret"}
    factors = ["report.straggler_factor=3", "report.straggler_seconds=0.02"]
    keys = [*TINY, *factors, "train.epochs=10", f"checkpoint.dir={tmp_path}"]
    good(2, keys, prepare=recovering(1, 24), env=lambda rank: env)
    lines = metrics(tmp_path / "run", "step")
    found = [line["stragglers"] for line in lines if "stragglers" in line]
    assert found and all([entry["rank"] for entry in entries] == [1] for entries in found)
    assert "stragglers" in lines[23] and "stragglers" not in lines[-1]
    assert capfd.readouterr().out.count("rank 1 lags: its own work per step takes") == 1
    named = [body["stragglers"] for body in taken if "stragglers" in body]
    assert [set(body) for body in taken if "stragglers" in body] == [{"stragglers"}] * len(named)
    (last,) = next(entries for entries in reversed(named) if entries)
    assert last["rank"] == 1 and last["slowdown"] > 1 and named[-1] == []


def late_in(data: range, forward: range, rank: int, passes: int, stages: int) -> Callable[[int], None]:
    """Return a hook for `good` that delays ranks in parts of their steps.

    Every rank sleeps during each of its `passes` forward passes of a step, longest in the first of
    `stages` stages. `rank` sleeps four times as long in the steps `forward`, and while reading its
    data in the steps `data`. The noise of a busy machine is small compared with these delays.
    """
    base = min(0.5, 0.05 * slowness())

    def prepare(own: int) -> None:
        from ddpjob_trainer.data.in_memory import MemoryData
        from ddpjob_trainer.reporting.ledger import Ledger

        usual = base * (1 if own % stages else stages)
        stream, begin, convolve, step = MemoryData.train_stream, Ledger.step, nn.Conv2d.forward, 0

        def step_begins(self: Ledger, number: int, taken: Any) -> None:
            nonlocal step
            step = number
            begin(self, number, taken)

        def read(self: MemoryData, parts: Any) -> Iterator[Any]:
            for batch in stream(self, parts):
                time.sleep(3 * usual / passes * (own == rank and step in data))
                yield batch

        def late(self: nn.Conv2d, values: torch.Tensor) -> torch.Tensor:
            if self.training:
                factor = 4 if own == rank and step in forward else 1
                time.sleep(usual * factor / passes / convolutions[own % stages])
            return convolve(self, values)

        convolutions = {0: 2, 1: 1} if stages == 2 else {0: 3}
        MemoryData.train_stream, Ledger.step = read, step_begins  # type: ignore[method-assign]
        nn.Conv2d.forward = late  # type: ignore[method-assign]

    return prepare


@pytest.mark.parametrize(
    ("world", "more", "rank", "passes"),
    [
        (2, [], 1, 1),
        (2, SYNCHRONIZED, 0, 1),
        (3, ["model.norm=batch", "data.micro_batches=4"], 1, 2),
        (2, ["strategy=fsdp"], 1, 1),
        (2, ["strategy=fsdp", "whole", *SHARED], 0, 2),
        (4, ["strategy=pipeline", "pipeline.stages=2", "pipeline.micro_batches=2"], 2, 2),
        (4, ["strategy=pipeline", "pipeline.stages=2", "pipeline.micro_batches=2"], 1, 2),
    ],
)
def test_only_the_rank_that_lags_is_reported(
    world: int, more: list[str], rank: int, passes: int, tmp_path: Path
) -> None:
    """No rank is reported while all are equally fast. "whole" means that ranks cannot share
    micro-batches, so one rank also computes another's.
    """
    late = late_in(range(9, 17), range(25, 33), rank, passes, 2 if "strategy=pipeline" in more else 1)

    def prepare(own: int) -> None:
        if "whole" in more:
            train.can_be_shared = lambda _: False  # type: ignore[attr-defined]
        late(own)

    factors = ["report.straggler_factor=2", "report.straggler_seconds=0"]
    keys = [*TINY, "train.epochs=4", *factors, *(key for key in more if key != "whole"), f"checkpoint.dir={tmp_path}"]
    good(world, keys, prepare=prepare)
    lines = metrics(tmp_path / "run", "step")
    found = {line["step"]: [entry["rank"] for entry in line.get("stragglers", ())] for line in lines}
    steps = [step for step, ranks in found.items() if ranks]
    seen = {step: (ranks, lines[step - 1]["ranks"]["ownSeconds"]) for step, ranks in found.items()}
    assert all(ranks == [rank] for ranks in found.values() if ranks), seen
    assert {15, 16, 31, 32} <= set(steps) <= {*range(11, 24), *range(27, 33)}, seen


def said(taken: list[dict[str, Any]]) -> list[list[dict[str, float]]]:
    return [body["stragglers"] for body in taken if "stragglers" in body]


@pytest.mark.parametrize(("codes", "times"), [([503, 0, 200], 1), ([400], 0), ([200], 1)])
def test_slow_ranks_are_reported_until_a_coordinator_has_responded(posts: Any, codes: list[int], times: int) -> None:
    port, taken, answers = posts
    answers[:] = codes
    link = ProgressClient(f"127.0.0.1:{port}", "secret")
    link.post_stragglers([{"rank": 1, "slowdown": 2.0}])
    for step in range(5):
        link.post({"step": step})
        until = time.monotonic() + 30
        while {"step": step} not in taken and time.monotonic() < until:
            time.sleep(0.02)
    link.close()
    assert said(taken) == [[{"rank": 1, "slowdown": 2.0}]] * times and answers == codes[-1:]


# ------------------------------------------------------------ the share of the peak


def test_flops_match_a_count_by_hand_and_are_counted_without_computing() -> None:
    settings = config.load(None, ["model.width=8"])
    state = torch.get_rng_state()
    found = flops.flops_per_sample(settings, (1, 8, 8), 10)
    assert torch.equal(torch.get_rng_state(), state)
    forward = 2 * 9 * (64 * 1 * 8 + 64 * 8 * 16 + 16 * 16 * 16) + 2 * 64 * 10
    # The backward pass costs as much for the weights as for the inputs, except for the images.
    assert found == 3 * forward - 2 * 9 * 64 * 1 * 8
    resnet = config.load(None, ["model.name=torchvision:resnet18", "data.name=imagefolder"])
    assert flops.flops_per_sample(resnet, (3, 224, 224), 1000) == pytest.approx(3 * 3.63e9, rel=0.03)  # 1.814 GMAC


def test_flops_are_counted_once_per_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []

    def count(settings: config.Config, *_: Any, **__: Any) -> float:
        counted.append(settings.model.name)
        return float(len(counted))

    monkeypatch.setattr(flops, "flops_per_sample", count)

    def found(*keys: str) -> float:
        return flops.flops_of_run(config.load(None, [*keys, f"train.run_dir={tmp_path}"]), (1, 8, 8), 10)

    assert [found(), found()] == [1, 1]
    assert [found("model.width=8"), found("model.width=8")] == [2, 2]
    (tmp_path / "flops.json").write_text('{"of": ')
    assert [found(), found()] == [3, 3]
    assert [found("model.name=mine:model"), found("model.name=mine:model")] == [4, 5]


def test_a_model_that_fails_while_flops_are_counted_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> nn.Module:
        raise RuntimeError("needs values")

    monkeypatch.setattr(flops, "build_model", broken)
    assert flops.flops_per_sample(config.load(None, []), (1, 8, 8), 10) == 0.0


@pytest.mark.parametrize(
    ("name", "dtype", "tf32", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, True, 989e12),
        ("NVIDIA H100 PCIe", torch.bfloat16, True, 756e12),
        ("NVIDIA H200", torch.float32, True, 494e12),
        ("NVIDIA A100-SXM4-80GB", torch.float32, False, 19.5e12),
        ("NVIDIA A10G", torch.bfloat16, True, 70e12),
        ("NVIDIA A10", torch.bfloat16, True, 125e12),
        ("NVIDIA L40S", torch.float16, True, 362e12),
        ("Tesla V100-SXM2-16GB", torch.float32, True, 15.7e12),
        ("Tesla T4", torch.float16, True, 65e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", torch.bfloat16, True, 0.0),
        ("NVIDIA A1000 Laptop GPU", torch.bfloat16, True, 0.0),
        ("NVIDIA GeForce GTX 1080", torch.bfloat16, True, 0.0),
    ],
)
def test_the_peak_of_a_device_is_known_by_its_name(name: str, dtype: torch.dtype, tf32: bool, expected: float) -> None:
    assert flops.peak(name, dtype, tf32=tf32) == expected


def test_the_share_of_the_peak_is_computed_from_flops_and_time(tmp_path: Path) -> None:
    machines = Machines([1.0], [1.0], [0.0], [1.0], {}, flops=2e9, peak=1e12)
    assert machines.mfu(100) == pytest.approx(0.2)
    assert Machines([1.0], [1.0], [0.0], [1.0], {}).mfu(100) is None
    settings = config.load(None, ["report.peak_flops=5e9"])
    assert flops.device_peak(settings, torch.device("cpu"), torch.float32) == 5e9
    assert flops.device_peak(config.load(None, []), torch.device("cpu"), torch.float32) == 0
    keys = [*TINY, "train.epochs=1", "report.peak_flops=1e7"]  # low, so four digits of the share are significant
    good(2, [*keys, f"checkpoint.dir={tmp_path}"])
    check_shares(metrics(tmp_path / "run", "step"), 2e7)


def check_shares(lines: list[dict[str, Any]], peak: float) -> None:
    """Check the MFU, which is computed from the speed over the last reports (here all of them)."""
    per_sample = flops.flops_per_sample(config.load(None, TINY), (1, 8, 8), 10)
    seconds_per_sample = 0.0
    for number, line in enumerate(lines[:-1], 1):  # the last batch is smaller
        seconds_per_sample += 1 / line["samplesPerSecond"]
        speed = number / seconds_per_sample
        assert line["mfu"] == pytest.approx(speed * per_sample / peak, rel=0.01, abs=1e-4)
    assert len(lines) == 8 and lines[-1]["mfu"] > 0.05


def with_peaks(*peaks: float) -> Callable[[int], None]:
    """Return a hook for `good` that sets the peak of each rank's device by its name. FLOPs are
    counted before there are peers.
    """

    def prepare(rank: int) -> None:
        count = flops.flops_per_sample

        def alone(*arguments: Any, **more: Any) -> float:
            assert not torch.distributed.is_initialized()
            return count(*arguments, **more)

        train.device_peak = lambda *_: peaks[rank]  # type: ignore[attr-defined]
        flops.flops_per_sample = alone

    return prepare


def test_peaks_of_different_devices_add_up(tmp_path: Path) -> None:
    keys = [*TINY, "train.epochs=1", f"checkpoint.dir={tmp_path}"]
    good(2, keys, prepare=with_peaks(1e7, 3e7))
    check_shares(metrics(tmp_path / "run", "step"), 4e7)


@pytest.mark.parametrize("peaks", [(1e7, 0.0), (0.0, 1e7)])
def test_there_is_no_share_if_one_ranks_peak_is_unknown(
    peaks: tuple[float, float], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    good(2, [*TINY, "train.epochs=1", f"checkpoint.dir={tmp_path}"], prepare=with_peaks(*peaks))
    assert all("mfu" not in line for line in metrics(tmp_path / "run", "step"))
    assert capfd.readouterr().out.count(f"because the peak FLOP/s of rank {peaks.index(0)}'s device is unknown") == 1


def test_uncountable_flops_are_reported_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def prepare(_: int) -> None:
        def broken(*_: Any) -> nn.Module:
            raise RuntimeError("needs values")

        flops.build_model = broken  # type: ignore[attr-defined]

    keys = [*TINY, "train.epochs=1", "report.peak_flops=1e7", f"checkpoint.dir={tmp_path}"]
    good(2, keys, prepare=prepare)
    assert all("mfu" not in line for line in metrics(tmp_path / "run", "step"))
    assert capfd.readouterr().out.count("no MFU, because the FLOPs of model.name=") == 1


def test_the_peak_of_a_process_with_several_devices_is_their_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config.load(None, ["strategy=ddp_mp", "ddp_mp.devices=4"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert [computes_on(settings, device) for device in (cuda, cpu)] == [4, 1]  # the stages share the CPU
    assert [computes_on(config.load(None, ["strategy=dp"]), device) for device in (cuda, cpu)] == [3, 1]
    assert computes_on(config.load(None, []), cuda) == 1


def test_flops_are_counted_for_synchronized_normalization_and_integer_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ["model.name=torchvision:resnet18"]
    found = [
        flops.flops_per_sample(config.load(None, [*plain, *more]), (3, 64, 64), 10)
        for more in ([], ["model.sync_batchnorm=true"], ["model.compile=default"])
    ]
    assert found[0] > 0 and found == found[:1] * 3
    (tmp_path / "words_of_flops.py").write_text(
        "from torch import nn\n"
        "def build(shape, classes):\n"
        "    return nn.Sequential(nn.Embedding(9, 5), nn.Flatten(), nn.Linear(5 * shape[0], classes))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    words = config.load(None, ["model.name=words_of_flops:build"])
    assert flops.flops_per_sample(words, (4,), 3, whole_numbers=True) == 3 * 2 * 5 * 4 * 3
    assert flops.flops_per_sample(words, (4,), 3) == 0

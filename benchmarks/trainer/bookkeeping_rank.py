"""One rank of `bookkeeping`: trains, and writes the CPU seconds of each part of a step.

    python -m benchmarks.trainer.bookkeeping_rank FILE CONFIG WARM STEPS KEY=VALUE ...

After each step, it takes a step of a bare loop (forward, backward, optimizer) on the same batch,
with a copy of the model. With several ranks, this is a plain DDP loop, whose own threads count too.
"""

from __future__ import annotations

import copy
import functools
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from ddpjob_trainer import config, train
from ddpjob_trainer.checkpoints.folder import CheckpointFolder
from ddpjob_trainer.data.dataset import Batch
from ddpjob_trainer.data.in_memory import MemoryData
from ddpjob_trainer.data.sampler import ElasticSampler
from ddpjob_trainer.distributed.step_clock import StepClock
from ddpjob_trainer.lifecycle.signals import Agreement, StopRequest
from ddpjob_trainer.lifecycle.stack_dumps import StackDumps
from ddpjob_trainer.model.batchnorm_stats import BatchStatistics
from ddpjob_trainer.optim.loss import Loss
from ddpjob_trainer.optim.nonfinite import NonFiniteGuard
from ddpjob_trainer.optim.optimizers import build_optimizer
from ddpjob_trainer.optim.precision import Precision
from ddpjob_trainer.reporting.ledger import Ledger
from ddpjob_trainer.reporting.profiler import Profile
from ddpjob_trainer.reporting.reporter import Reporter
from ddpjob_trainer.strategies.strategy import Strategy

from benchmarks.trainer.bookkeeping import BACKWARD, BARE, BATCH, FORWARD, OPTIMIZER, OTHER_THREADS, REST

_METHODS: list[tuple[type, str, str]] = [
    (Loss, "sum", FORWARD),
    (Precision, "backward", BACKWARD),
    (Precision, "step", "norm of the gradients, finite or not"),
    (NonFiniteGuard, "record", "norm of the gradients, finite or not"),
    (NonFiniteGuard, "check", "norm of the gradients, finite or not"),
    (BatchStatistics, "exchange", "running statistics"),
    (Ledger, "step", "ledger"),
    (StopRequest, "is_due", "stop flag"),
    (StopRequest, "agreement", "stop flag"),
    (Agreement, "wait", "stop flag"),
    (CheckpointFolder, "due", "whether a checkpoint is due"),
    (train.Trainer, "_report_checkpoints", "whether a checkpoint is due"),
    (train.Trainer, "_report", "progress reports"),
    (Reporter, "_note_stragglers", "stragglers"),
    (StepClock, "lap", "step clock"),
    (StepClock, "watch", "step clock"),
    (StepClock, "_at_begin", "step clock"),
    (StepClock, "take", "step clock"),
    (Strategy, "seed", "seeds"),
    (StackDumps, "alive", "hang detection"),
    (Profile, "before", "profile"),
]
_ITERATORS = [(ElasticSampler, "upcoming", "dealing"), (MemoryData, "train_stream", BATCH)]


class Meter:
    """The thread's CPU time, charged to the innermost open part, or to REST outside all
    parts.

    The time for reading the clock is measured once and subtracted.
    """

    def __init__(self) -> None:
        self._open = [REST]
        self._seconds: dict[str, float] = defaultdict(float)
        self._switches: Counter[str] = Counter()
        self._last = time.thread_time()
        began, calls = time.thread_time(), 1000
        for _ in range(calls):
            with self.part("calibration"):
                pass
        self._cost = (time.thread_time() - began) / (2 * calls)
        self.take()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Charge the time inside the context to `name`."""
        self._switch()
        self._open.append(name)
        try:
            yield
        finally:
            self._switch()
            self._open.pop()

    def take(self) -> dict[str, float]:
        """Return the seconds of each part since the last call."""
        self._switch()
        found = {name: seconds - self._cost * self._switches[name] for name, seconds in self._seconds.items()}
        self._seconds.clear()
        self._switches.clear()
        return found

    def _switch(self) -> None:
        now = time.thread_time()
        self._seconds[self._open[-1]] += now - self._last
        self._switches[self._open[-1]] += 1
        self._last = now

    def method(self, owner: type, name: str, part: str) -> None:
        """Charge a method's time to `part`."""
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def timed(*given: Any, **named: Any) -> Any:
            with self.part(part):
                return inner(*given, **named)

        setattr(owner, name, timed)

    def iterator(self, owner: type, name: str, part: str, seen: Callable[[Any], None]) -> None:
        """Charge the time for the next item of a method's iterator to `part`."""
        inner = getattr(owner, name)

        def timed(*given: Any) -> Iterator[Any]:
            items = inner(*given)
            while True:
                with self.part(part):
                    item = next(items, None)
                if item is None:
                    return
                seen(item)
                yield item

        setattr(owner, name, timed)

    def context(self, owner: type, name: str, part: str) -> None:
        """Charge the beginning and the end of a method's context to `part`."""
        inner = getattr(owner, name)

        @contextmanager
        def timed(*given: Any) -> Iterator[None]:
            with self.part(part):
                context: AbstractContextManager[None] = inner(*given)
                context.__enter__()
            yield
            with self.part(part):
                context.__exit__(None, None, None)

        setattr(owner, name, timed)


class BareLoop:
    """Forward, backward, optimizer, on the trainer's batches with a copy of its model."""

    def __init__(self, settings: config.Config) -> None:
        self._settings = settings
        self._batches: list[Batch] = []

    def begin(self, model: torch.nn.Module) -> None:
        """Begin with the model's weights."""
        self._model = copy.deepcopy(model)
        self._optimizer = build_optimizer(self._settings.optim, list(self._model.named_parameters()))
        if torch.distributed.is_initialized():
            self._model = torch.nn.parallel.DistributedDataParallel(self._model)

    def see(self, item: Any) -> None:
        """Remember a batch for the next step."""
        if isinstance(item, Batch):
            self._batches.append(item)

    def step(self) -> None:
        """Take a step on the batches since the last one."""
        for batch in self._batches:
            loss = torch.nn.functional.cross_entropy(self._model(batch.images), batch.labels)
            loss.backward()
        self._batches.clear()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


def main() -> int:
    """Run the trainer, and return its exit code."""
    path, recipe, warm, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    settings = config.load(recipe, sys.argv[5:])
    meter, bare = Meter(), BareLoop(settings)
    for owner, name, part in _METHODS:
        meter.method(owner, name, part)
    for owner, name, part in _ITERATORS:
        meter.iterator(owner, name, part, bare.see)
    meter.context(BatchStatistics, "of_micro", "running statistics")
    prepare, update = Strategy.prepare, Strategy.update
    state = {"taken": 0, "others": 0.0, "bare": 0.0}

    def prepared(self: Strategy, model: torch.nn.Module, shape: tuple[int, ...]) -> None:
        prepare(self, model, shape)
        bare.begin(self.model)
        for function in ("step", "zero_grad"):
            setattr(self.optimizer, function, _timed(meter, getattr(self.optimizer, function), OPTIMIZER))
        self.network.forward = _timed(meter, self.network.forward, FORWARD)  # type: ignore[method-assign]

    def updated(self: Strategy, rate: float) -> Any:
        result = update(self, rate)
        others = time.process_time() - time.thread_time()
        with meter.part(BARE):
            bare.step()
        bares = time.process_time() - time.thread_time() - others
        if self.model.training:
            state["taken"] += 1
        if state["taken"] == warm:
            meter.take()
            state["others"] = others + bares
            state["bare"] = 0.0
        elif state["taken"] == warm + steps:
            found = {**meter.take(), OTHER_THREADS: others - state["others"] - state["bare"]}
            found[BARE] += state["bare"] + bares
            path.write_text(json.dumps({part: seconds / steps for part, seconds in found.items()}))
        else:
            state["bare"] += bares
        return result

    Strategy.prepare, Strategy.update = prepared, updated  # type: ignore[method-assign]
    return train.run(settings)


def _timed(meter: Meter, function: Callable[..., Any], part: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def timed(*given: Any, **named: Any) -> Any:
        with meter.part(part):
            return function(*given, **named)

    return timed


if __name__ == "__main__":
    sys.exit(main())

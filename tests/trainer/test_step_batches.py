"""A strategy receives each micro-batch of a step together with its data, and must process all of
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import write_image_folder
from ddpjob_trainer import config, train
from ddpjob_trainer.data.dataset import Batch, MicroBatches
from ddpjob_trainer.data.in_memory import MemoryData
from ddpjob_trainer.data.sampler import Micro
from ddpjob_trainer.distributed.process_group import Group, Reduction
from ddpjob_trainer.strategies.strategy import Strategy
from ranks import TINY


def settings(folder: Path) -> config.Config:
    return config.load(None, [*TINY, "strategy=single", "data.micro_batches=4", f"checkpoint.dir={folder}"])


def test_a_micro_batch_that_a_strategy_left_out_is_detected_in_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward = Strategy.backward

    def all_but_the_last(self: Strategy, micro_batches: MicroBatches, count: int) -> torch.Tensor:
        return backward(self, list(islice(micro_batches, len(micro_batches) - 1)), count)

    monkeypatch.setattr(Strategy, "backward", all_but_the_last)
    with pytest.raises(AssertionError, match="expected micro-batch 0, but got 3 of a different step"):
        train.run(settings(tmp_path))


def test_each_micro_batch_is_passed_with_its_own_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digits' labels identify the samples in a batch."""
    opened: list[train.Trainer] = []
    make, backward = train.Trainer.__init__, Strategy.backward_one
    pairs = []

    def remember(self: train.Trainer, *arguments: object) -> None:
        opened.append(self)
        make(self, *arguments)  # type: ignore[arg-type]

    def watched(self: Strategy, micro: object, batch: object, count: int) -> torch.Tensor:
        pairs.append((micro, batch))
        return backward(self, micro, batch, count)  # type: ignore[arg-type]

    monkeypatch.setattr(train.Trainer, "__init__", remember)
    monkeypatch.setattr(Strategy, "backward_one", watched)
    assert train.run(settings(tmp_path)) == 0
    assert len(pairs) == 4 * opened[0].step
    for micro, batch in pairs:
        [expected] = opened[0].data.train_batches([micro.samples], 0)
        assert torch.equal(batch.labels, expected.labels)


def test_the_next_epochs_first_batch_is_requested_before_the_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data set reads one batch ahead, as worker processes do."""
    asked: list[int] = []
    at_evaluation: list[int] = []
    stream, evaluate = MemoryData.train_stream, train.evaluate

    def ahead(self: MemoryData, parts: Iterable[tuple[int, list[int]]]) -> Iterator[Batch]:
        def noted() -> Iterator[tuple[int, list[int]]]:
            for epoch, part in parts:
                asked.append(epoch)
                yield epoch, part

        batches = stream(self, noted())
        ready = next(batches)
        for batch in batches:
            yield ready
            ready = batch
        yield ready

    def evaluated(*arguments: Any, **more: Any) -> Any:
        at_evaluation.append(max(asked))
        return evaluate(*arguments, **more)

    monkeypatch.setattr(MemoryData, "train_stream", ahead)
    monkeypatch.setattr(train, "evaluate", evaluated)
    assert train.run(settings(tmp_path)) == 0
    assert at_evaluation == [1, 1], "after epoch 0, batches of epoch 1 are requested; after epoch 1, there are no more"


def test_each_step_has_one_reduction_besides_those_of_the_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this reduction, the ranks also exchange the number of unreadable images. From the third
    step on, it starts before the last forward pass, which hides its cost.
    """
    write_image_folder(tmp_path / "images", 8)
    reductions: list[str] = []
    begin, backward, backward_one = Group.sum_begin, Strategy.backward, Strategy.backward_one

    def counted(self: Group, values: torch.Tensor) -> Reduction:
        reductions.append("sum")
        return begin(self, values)

    def step(self: Strategy, micro_batches: MicroBatches, count: int) -> torch.Tensor:
        reductions.append("step")
        return backward(self, micro_batches, count)

    def one(self: Strategy, micro: Micro, batch: Batch, count: int) -> torch.Tensor:
        reductions.append("pass")
        return backward_one(self, micro, batch, count)

    monkeypatch.setattr(Strategy, "backward_one", one)
    monkeypatch.setattr(Group, "sum_begin", counted)
    monkeypatch.setattr(Strategy, "backward", step)
    arguments = [
        "data.name=imagefolder", f"data.dir={tmp_path / 'images'}", "data.image_size=8", "data.workers=0",
        "data.batch=4", "data.micro_batches=2", "model.width=4", "train.epochs=1", "train.log_every=100",
        "checkpoint.every_seconds=0",
        "eval.pictures=false", f"checkpoint.dir={tmp_path / 'run'}",
    ]  # fmt: skip
    assert train.run(config.load(None, arguments)) == 0
    first, last = reductions.index("step"), len(reductions) - reductions[::-1].index("step") - 1
    order, steps = ["step", "pass", "sum", "pass"], reductions[first:last].count("step")
    assert reductions[first:last] == 2 * ["step", "pass", "pass", "sum"] + (steps - 2) * order and steps > 2

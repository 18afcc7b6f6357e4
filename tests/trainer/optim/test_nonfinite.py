"""If the loss is not finite on one rank, every rank skips the step. Three such steps in a row end
all ranks with an error that reports the step, rank and samples.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import ConfigError, TrainingError
from ddpjob_trainer.optim.nonfinite import NonFiniteGuard
from ddpjob_trainer.optim.precision import Update
from ranks import TINY, final_losses, good, metrics, run

WORSE = [*TINY, "train.epochs=1", "optim.lr=0.05"]


def broken_at(steps: range, rank: int, *, gradients: bool = True) -> Callable[[int], None]:
    """Make the loss of one rank NaN at these steps, counted from 1. Without `gradients`, make it
    infinite, but leave the gradients finite.
    """

    def prepare(own: int) -> None:
        from ddpjob_trainer.optim import loss

        compute, calls = loss.loss_sum, [0]

        def loss_sum(*arguments: Any, **more: Any) -> torch.Tensor:
            calls[0] += 1
            broken, found = own == rank and calls[0] in steps, compute(*arguments, **more)
            return found * (torch.nan if broken else 1.0) if gradients else found + (torch.inf if broken else 0.0)

        loss.loss_sum = loss_sum

    return prepare


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_is_skipped_on_all_ranks_and_reported(world: int, tmp_path: Path, capfd: Any) -> None:
    """The result equals that of a run without steps 3 and 4. If a single rank had used its
    gradient, the ranks would differ.
    """
    good(world, [*WORSE, f"checkpoint.dir={tmp_path}"], prepare=broken_at(range(3, 5), world - 1))
    reported = metrics(tmp_path / "run", "skipped")
    assert [(row["step"], list(row["samples"])) for row in reported] == [(3, [str(world - 1)]), (4, [str(world - 1)])]
    share = 200 // world
    assert all(len(row["samples"][str(world - 1)]) == share for row in reported)
    assert f"warning: step 3: the loss is not finite on rank {world - 1} (samples " in capfd.readouterr().out
    rows = metrics(tmp_path / "run", "step")
    assert [row["loss"] is None for row in rows] == [number in (3, 4) for number in range(1, 9)]
    assert rows[-1]["skippedSteps"] == 2 and rows[-1]["step"] == 8
    weights = torch.load(tmp_path / "step-000000008.pt", weights_only=True)["model"]
    assert all(tensor.isfinite().all() for tensor in weights.values())


@pytest.mark.parametrize("strategy", ["ddp", "pipeline"])
def test_a_step_with_an_infinite_loss_and_finite_gradients_is_skipped_too(strategy: str, tmp_path: Path) -> None:
    micros = ["data.micro_batches=2"] if strategy == "pipeline" else []
    steps = range(5, 7) if strategy == "pipeline" else range(3, 4)
    arguments = [*WORSE, f"strategy={strategy}", *micros, f"checkpoint.dir={tmp_path}"]
    good(2, arguments, prepare=broken_at(steps, 1, gradients=False))
    assert [row["step"] for row in metrics(tmp_path / "run", "skipped")] == [3]
    assert [row["step"] for row in metrics(tmp_path / "run", "step") if row["loss"] is None] == [3]


def test_three_nonfinite_steps_in_a_row_end_all_ranks_and_name_the_samples(tmp_path: Path) -> None:
    ended = run(2, [*WORSE, f"checkpoint.dir={tmp_path}"], prepare=broken_at(range(4, 9), 1))
    assert [end.code for end in ended] == [1, 1]
    for end in ended:
        assert "step 6: the loss is not finite on rank 1 (samples " in end.error and " and 84 more)" in end.error
        assert "3 steps in a row were skipped (train.nonfinite_limit=3)" in end.error and "Lower optim.lr" in end.error
    named = ended[0].error.split("(samples ")[1].split(" and ")[0]
    reported = metrics(tmp_path / "run", "skipped")
    assert [row["step"] for row in reported] == [4, 5] and len(named.split(", ")) == 16


def test_the_count_of_nonfinite_steps_restarts_after_a_finite_step(tmp_path: Path) -> None:
    def prepare(rank: int) -> None:
        broken_at(range(2, 4), 0)(rank)
        broken_at(range(5, 7), 0)(rank)

    good(1, [*WORSE, f"checkpoint.dir={tmp_path}"], prepare=prepare)
    assert [row["step"] for row in metrics(tmp_path / "run", "skipped")] == [2, 3, 5, 6]


def test_the_first_nonfinite_step_ends_the_run_if_configured(tmp_path: Path) -> None:
    (end,) = run(
        1, [*WORSE, f"checkpoint.dir={tmp_path}", "train.nonfinite_limit=1"], prepare=broken_at(range(2, 3), 0)
    )
    assert (
        end.code == 1
        and "step 2: the loss is not finite on rank 0" in end.error
        and "the step was skipped" in end.error
    )


def test_the_weights_would_become_nan_if_the_step_were_not_skipped(tmp_path: Path) -> None:
    """Deliberate defect: the optimizer takes every step, even with a nonfinite gradient."""

    def prepare(rank: int) -> None:
        from ddpjob_trainer.optim.precision import Precision

        def always(self: Precision, optimizer: torch.optim.Optimizer, norm: torch.Tensor, weights: int) -> bool:
            optimizer.step()
            return False

        Precision._step_if_finite = always  # type: ignore[method-assign]
        broken_at(range(3, 4), 0)(rank)

    (end,) = run(1, [*WORSE, f"checkpoint.dir={tmp_path}"], prepare=prepare)
    assert end.code == 1 and "the loss is nan" in end.error


# ------------------------------------------------------------ the counting itself


def guard(limit: int = 3, *, dynamic: bool = False) -> tuple[NonFiniteGuard, list[int]]:
    reported: list[int] = []
    return NonFiniteGuard(
        limit, Group(), lambda step, text, samples: reported.append(step), dynamic_scale=dynamic
    ), reported


def take(watch: NonFiniteGuard, step: int, skipped: Any, loss: float = 1.0) -> tuple[torch.Tensor, Any]:
    return watch.record(step, [step], torch.tensor(loss), 10, Update(1.0, skipped))


def test_a_dynamic_scale_may_overflow_while_it_adapts() -> None:
    watch, reported = guard(dynamic=True)
    for step in range(1, 31):
        losses, count = take(watch, step, True)
        assert (float(losses), count) == (0.0, 0)
    assert watch.skipped == 30 and reported == []
    with pytest.raises(TrainingError, match="step 43: the gradient overflows; 3 steps in a row"):
        for step in range(31, 60):
            take(watch, step, True)
    watch, reported = guard(dynamic=True)
    with pytest.raises(TrainingError, match=r"step 3: the loss is not finite on rank 0 \(samples 3\)"):
        for step in range(1, 9):
            take(watch, step, True, torch.nan)


def test_samples_that_all_nonfinite_steps_have_in_common_are_reported() -> None:
    texts: list[str] = []
    watch = NonFiniteGuard(9, Group(), lambda step, text, samples: texts.append(text))

    def skip(step: int, samples: list[int], loss: float = torch.nan) -> str:
        watch.record(step, samples, torch.tensor(loss), 10, Update(1.0, True))
        return texts[-1]

    assert "may be the cause" not in skip(1, [7, *range(100, 150)])
    assert "may be the cause" not in skip(2, [7, *range(120, 180)]), "the steps share 31 samples"
    assert "may be the cause" not in skip(3, [1, 2], loss=1.0), "the gradient overflows, so the loss is finite"
    assert "as in earlier steps with these samples, whose data may be the cause: 7;" in skip(4, [7, 500, 501])
    assert "may be the cause" not in skip(5, [8, 9]), "a step without common samples"


def test_a_static_scale_or_no_scale_may_not_overflow() -> None:
    watch, reported = guard(limit=2)
    take(watch, 1, True)
    with pytest.raises(TrainingError, match="step 2: the gradient overflows; 2 steps in a row"):
        take(watch, 2, True)
    assert reported == [1]


def test_on_an_accelerator_training_does_not_wait_for_the_result_of_a_check() -> None:
    """`skipped` is then a tensor on the device. Sums are computed on the device as well, and the
    value is read only for the report.
    """
    watch, reported = guard()
    kept = [take(watch, step, torch.tensor(step == 2), torch.inf if step == 2 else 3.0) for step in (1, 2, 3)]
    assert [float(losses) for losses, _ in kept] == [3.0, 0.0, 3.0] and [int(count) for _, count in kept] == [10, 0, 10]
    assert reported == [] and watch.skipped == 0
    watch.check()
    assert reported == [2] and watch.skipped == 1
    for step in (4, 5, 6):
        take(watch, step, torch.tensor(True), torch.nan)
    with pytest.raises(TrainingError, match="step 6"):
        watch.check()


def test_a_limit_of_nonfinite_steps_below_1_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.nonfinite_limit=0: must be at least 1"):
        guard(limit=0)


def test_the_loss_curve_continues_unchanged_after_a_skipped_step(tmp_path: Path) -> None:
    """Step 1 is skipped on two ranks. The other losses equal those of a run that begins one step
    later with the same weights.
    """
    good(2, [*WORSE, f"checkpoint.dir={tmp_path}/a"], prepare=broken_at(range(1, 2), 1))
    good(1, [*WORSE, f"checkpoint.dir={tmp_path}/b"], prepare=broken_at(range(1, 2), 0))
    assert final_losses(tmp_path / "a" / "run")[1:] == pytest.approx(final_losses(tmp_path / "b" / "run")[1:], rel=1e-4)


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline", "parameter_server"])
def test_every_strategy_skips_the_step_on_all_ranks(strategy: str, tmp_path: Path) -> None:
    """Only the rank that computes the loss detects it: the last stage of a pipeline, or the worker
    of a parameter server.
    """
    micros = ["data.micro_batches=2"] if strategy == "pipeline" else []
    steps = range(5, 7) if strategy == "pipeline" else range(3, 4)
    arguments = [*WORSE, f"strategy={strategy}", *micros, f"checkpoint.dir={tmp_path}"]
    good(2, arguments, prepare=broken_at(steps, 1))
    reported = metrics(tmp_path / "run", "skipped")
    assert [(row["step"], list(row["samples"])) for row in reported] == [(3, ["1"])]
    rows = metrics(tmp_path / "run", "step")
    assert len(rows) == 8 and [row["step"] for row in rows if row["loss"] is None] == [3]

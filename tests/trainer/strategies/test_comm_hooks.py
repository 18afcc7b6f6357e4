"""DDP's communication hooks send less data and hardly change the curve. Incompatible settings are
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ddpjob_trainer import config, train
from ddpjob_trainer.errors import ConfigError
from ranks import TINY, final_losses, good, metrics, run, stop_at

ARGUMENTS = [*TINY, "train.epochs=1", "train.accumulate=2"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("whole")
    good(1, [*ARGUMENTS, f"checkpoint.dir={folder}"])
    return final_losses(folder / "run")


def noted(folder: Path) -> Callable[[int], None]:
    """Return a hook that makes each rank record the format and size of the gradients that it
    sends.
    """

    def prepare(rank: int) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        send = dist.all_reduce

        def note(tensor: torch.Tensor, *given: object, **more: object) -> object:
            with (folder / f"sent-{rank}").open("a") as file:
                file.write(f"{tensor.dtype} {tensor.numel()}\n")
            return send(tensor, *given, **more)  # type: ignore[arg-type]

        for module in (default_hooks, powerSGD_hook):
            module.dist = type("Dist", (), {**vars(dist), "all_reduce": staticmethod(note)})  # type: ignore[attr-defined]

    return prepare


@pytest.mark.parametrize(
    ("hook", "sent", "tolerance"), [("fp16", "torch.float16", 0.005), ("bf16", "torch.bfloat16", 0.02)]
)
def test_gradients_are_sent_at_half_their_size(
    hook: str, sent: str, tolerance: float, whole: list[float], tmp_path: Path
) -> None:
    """Over 8 steps. The relative rounding error is 5e-4 for float16 and 4e-3 for bfloat16. Losses
    change less than gradients.
    """
    good(2, [*ARGUMENTS, f"ddp.comm_hook={hook}", f"checkpoint.dir={tmp_path}"], prepare=noted(tmp_path))
    np.testing.assert_allclose(final_losses(tmp_path / "run"), whole, rtol=tolerance)
    assert final_losses(tmp_path / "run") != whole
    lines = (tmp_path / "sent-0").read_text().splitlines()
    weights = sum(value.numel() for value in _saved(tmp_path)["model"].values())
    assert {line.split()[0] for line in lines} == {sent} and sum(int(line.split()[1]) for line in lines) == 8 * weights


def _saved(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    state: dict[str, dict[str, torch.Tensor]] = torch.load(max(folder.glob("step-*.pt")), weights_only=True)
    return state


def test_powersgd_sends_little_data_and_starts_afresh_after_a_restart(whole: list[float], tmp_path: Path) -> None:
    """The gradients of the first steps after each start are sent uncompressed. A stop and a restart
    work.
    """
    keys = [*ARGUMENTS, "ddp.comm_hook=powersgd", "ddp.powersgd_start=2", f"checkpoint.dir={tmp_path}"]
    assert [end.code for end in run(2, keys, prepare=stop_at(5))] == [75, 75]
    curve = final_losses(tmp_path / "run")
    np.testing.assert_allclose(curve[:2], whole[:2], rtol=1e-4)
    good(2, keys, prepare=noted(tmp_path))
    sizes = [int(line.split()[1]) for line in (tmp_path / "sent-0").read_text().splitlines()]
    weights = sum(value.numel() for value in _saved(tmp_path)["model"].values())
    assert sizes[:2] == [weights, weights] and 0 < sum(sizes[2:]) < weights / 4, (
        "three steps were left, the first two of them uncompressed"
    )
    np.testing.assert_allclose(final_losses(tmp_path / "run"), whole, rtol=0.15)


def test_powersgd_continues_after_a_skipped_step(tmp_path: Path) -> None:
    """Regression: its error memory and its initial matrices contained values that were not
    finite.
    """

    def prepare(rank: int) -> None:
        from ddpjob_trainer.optim import loss

        compute, calls = loss.loss_sum, [0]

        def loss_sum(*arguments: Any, **more: Any) -> torch.Tensor:
            calls[0] += 1
            return compute(*arguments, **more) * (torch.nan if rank == 1 and calls[0] == 5 else 1.0)

        loss.loss_sum = loss_sum

    keys = [*TINY, "train.epochs=1", "ddp.comm_hook=powersgd", "ddp.powersgd_start=2", "ddp.powersgd_rank=2"]
    good(2, [*keys, f"checkpoint.dir={tmp_path}"], prepare=prepare)
    losses = [row["loss"] for row in metrics(tmp_path / "run", "step")]
    assert [loss is None for loss in losses] == [number == 5 for number in range(1, 9)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            ["ddp.comm_hook=fp16", "ddp.ordered=true"],
            r"ddp.comm_hook=fp16 compresses .*set ddp.comm_hook=none or ddp.ordered=false",
        ),
        (["ddp.comm_hook=powersgd", "ddp.powersgd_rank=0"], r"ddp.powersgd_rank=0: must be at least 1"),
        (["ddp.comm_hook=powersgd", "ddp.powersgd_start=1"], r"ddp.powersgd_start=1: must be at least 2"),
        (["ddp.comm_hook=fp8"], r"ddp.comm_hook: must be one of none, fp16, bf16, powersgd, not 'fp8'"),
        (["strategy=horovod", "ddp.ordered=true"], r"ddp.ordered: strategy=horovod .*set strategy=ddp"),
        (["strategy=deepspeed", "ddp.ordered=true"], r"ddp.ordered: strategy=deepspeed .*set strategy=ddp"),
        (
            ["strategy=parameter_server", "ddp.ordered=true"],
            r"ddp.ordered: strategy=parameter_server .*set strategy=ddp",
        ),
        (["strategy=fsdp", "ddp.comm_hook=fp16"], r"ddp.comm_hook: strategy=fsdp .*set strategy=ddp$"),
        (
            ["amp.level=O2", "ddp.ordered=true"],
            r"ddp.ordered needs bit-exact float32 sums; set amp.level=O0 or O1",
        ),
    ],
)
def test_contradictory_options_of_communication_hooks_are_refused(
    keys: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        train.run(config.load(None, [*ARGUMENTS, *keys, f"checkpoint.dir={tmp_path}"]))

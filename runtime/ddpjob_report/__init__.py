"""What a training script says to its DDPJob, and learns from it. Outside of a job it changes nothing.

    import ddpjob_report

    folder = ddpjob_report.checkpoint_dir()
    for step in range(first, steps):
        ...
        ddpjob_report.report(epoch=epoch, step=step, loss=loss, accuracy=accuracy)
        if ddpjob_report.should_stop():  # the same answer on every rank
            save(folder)
            ddpjob_report.saved_and_leave()

Job pods have it beside the runtime; elsewhere `pip install ddpjob` brings it. `ddpjob_report.huggingface`, `.lightning`
and `.accelerate` do the same for those frameworks.
"""

from __future__ import annotations

import operator
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from ddpjob_runtime import protocol

from ddpjob_report import link, stop

__all__ = ["checkpoint_dir", "report", "saved_and_leave", "should_stop"]

_NUMBERS = {"samples_per_second": "samplesPerSecond"}
"""Figures that the protocol spells differently from Python."""


def report(
    *,
    epoch: Any = None,
    epochs: Any = None,
    step: Any = None,
    steps: Any = None,
    loss: Any = None,
    accuracy: Any = None,
    samples_per_second: Any = None,
    eta: Any = None,
    **metrics: Any,
) -> None:
    """Show these figures in `kubectl get ddpjob` and in the job's status. Every rank may call it; rank 0's are shown.

    Args:
        epoch: the epoch that runs, from 1; of `epochs`.
        step: steps done since the training began, before a restart as well; of `steps`. Without it DDPJob counts the
            optimizer's steps since the restart.
        loss: the training loss.
        accuracy: from 0 to 1.
        samples_per_second: over all ranks.
        eta: seconds left.
        metrics: any other figures, by name.

    A figure is a number, or what `float()` makes one of: a tensor or an array of one element (a tensor on a GPU is
    waited for, as by `item()`: report every few steps). Infinite and undefined figures are shown as unknown. It
    returns at once: the newest figures are sent in the background, at most twice a second, and a coordinator that
    is away costs nothing but them.

    Raises:
        TypeError: an argument is no number; the message names it.
        ValueError: too many metrics, or a name that is too long.
    """
    given = {
        "epoch": epoch, "epochs": epochs, "step": step, "steps": steps, "loss": loss,
        "samples_per_second": samples_per_second, "eta": eta,
    }  # fmt: skip
    figures: dict[str, Any] = {
        _NUMBERS.get(name, name): _number(name, value) for name, value in given.items() if value is not None
    }
    others = {"accuracy": accuracy, **metrics}
    read = {name: _number(name, value) for name, value in others.items() if value is not None}
    _check_names(read)
    known = {name: value for name, value in read.items() if value is not None}
    if known:
        figures["metrics"] = known
    if figures:
        link.post(figures)


def checkpoint_dir(default: str | Path = "checkpoints") -> Path:
    """The folder in which the job keeps its checkpoints. Outside of a job it is `default`, which is created."""
    folder = os.environ.get("DDPJOB_CHECKPOINT_DIR")
    if folder:
        return Path(folder)  # Not created: under a volume that is not mounted would be the node's own disk.
    made = Path(default)
    made.mkdir(parents=True, exist_ok=True)
    return made


def should_stop() -> bool:
    """Whether to save and leave now: the pod of any rank was asked to end. All ranks call it, at the same steps.

    It is the same on every rank, where torch.distributed is initialized: the ranks agree by an exchange of one number
    over gloo, which does not wait for the GPU. From the first call on, SIGTERM ends the process no longer.

    Raises:
        RuntimeError: another rank is gone, as any collective does.
    """
    return stop.agreed()


def saved_and_leave() -> NoReturn:
    """End this process, after `should_stop()`, as one that has saved: it does not count as a failure.

    All ranks call it. It waits for those that are still saving.
    """
    link.close()
    stop.wait_for_others()
    sys.exit(protocol.EXIT_STEPPED_ASIDE)


def as_number(value: Any) -> int | float | None:
    """The number that the value is, or holds as its only element; None: it is or holds something else."""
    if isinstance(value, (bool, str, bytes, bytearray)):
        return None
    detach = getattr(value, "detach", None)  # torch warns of float() where gradients are needed
    try:
        return _plain(detach() if callable(detach) else value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def _number(name: str, value: Any) -> int | float | None:
    """The figure; None where it is infinite, undefined, or larger than a status can hold. Raises TypeError."""
    number = as_number(value)
    if number is None:
        shown = f"{value!r:.80}" if isinstance(value, (bool, str, bytes, int, float)) else f"a {type(value).__name__}"
        raise TypeError(f"ddpjob_report.report: {name} must be a number or a tensor of one element, not {shown}")
    return number if protocol.is_number(number) else None


def _plain(value: Any) -> int | float:
    try:
        return operator.index(value)
    except TypeError:
        return float(value)


def _check_names(metrics: dict[str, Any]) -> None:
    if len(metrics) > protocol.MAX_FIGURES:
        raise ValueError(f"ddpjob_report.report: at most {protocol.MAX_FIGURES} metrics, not {len(metrics)}")
    for name in metrics:
        if len(name) > protocol.MAX_FIGURES:
            most = f"at most {protocol.MAX_FIGURES} characters"
            raise ValueError(f"ddpjob_report.report: the name of a metric has {most}, not {len(name)}: {name[:40]}...")

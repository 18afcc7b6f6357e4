"""Lets a script report figures, find its checkpoint folder, and stop in time. Has no effect outside
a job.

    import ddpjob_report

    folder = ddpjob_report.checkpoint_dir()
    newest = ddpjob_report.restore_checkpoint()  # from the job's bucket, if it has one
    first = load(newest) if newest else 0
    for step in range(first, steps):
        ...
        ddpjob_report.report(epoch=epoch, step=step + 1, loss=loss, accuracy=accuracy)  # steps done
        if ddpjob_report.should_stop():  # the same result on every rank
            save(folder / "snapshot.pt")
            ddpjob_report.copy_checkpoint(folder / "snapshot.pt", step + 1)  # to the job's bucket
            ddpjob_report.saved_and_leave()

In the pods of a job, the runtime provides this package. Elsewhere, the `ddpjob` package provides
it. `ddpjob_report.huggingface`, `.lightning` and `.accelerate` connect scripts that use those
frameworks. If all ranks import `ddpjob_report`, slow ranks are detected (`ddpjob_pod/own_work.py`).
"""

from __future__ import annotations

import operator
import os
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

from ddpjob_pod import own_work
from ddpjob_pod.job_environment import JobEnvironment
from ddpjob_runtime import protocol

from ddpjob_report import curve_file, link, stop
from ddpjob_report.snapshots import Snapshots as Snapshots

__all__ = [
    *(
        "Snapshots",
        "checkpoint_dir",
        "copy_checkpoint",
        "report",
        "restore_checkpoint",
        "saved_and_leave",
        "should_stop",
    ),
]


def begin() -> None:
    """Start looking for slow ranks if this process belongs to a job. Called when the module is
    imported.
    """
    if JobEnvironment.read().coordinator:
        own_work.begin(lambda stragglers: link.post({protocol.STRAGGLERS: stragglers}))


begin()

_NUMBERS = {"samples_per_second": "samplesPerSecond"}
"""Names of figures that are spelled differently in the protocol."""


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
    """Show these figures in `kubectl get ddpjob` and in the job's status.

    Every rank may call this, but only rank 0's figures are shown.

    Args:
        epoch: the current epoch, from 1 to `epochs`.
        epochs: the planned number of epochs.
        step: number of steps completed since training began, including steps before a restart. If
            you do not pass it, DDPJob counts the optimizer's steps since the restart.
        steps: the planned number of steps.
        loss: the training loss.
        accuracy: the accuracy on the test set, from 0 to 1.
        samples_per_second: the speed of all ranks together.
        eta: number of seconds until training is done.
        metrics: any other figures, by name.

    A figure is a number, or anything that `float()` converts, such as a tensor or an array of one
    element. A loss that is infinite or undefined is shown as nan. Other figures that are infinite
    or undefined are not shown. For a tensor on a GPU, the call waits for the GPU, as `item()` does,
    so report only every few steps. Without such tensors, `report` returns immediately. The latest
    figures are sent in the background, at most twice a second. If the coordinator is unreachable,
    figures are lost, but training continues. Figures with a `step` are also kept in the checkpoint
    folder as curves for `ddpjob plot` and the dashboard. The file, run/metrics.jsonl, gets two
    lines per second at first, and fewer later.

    Raises:
        TypeError: an argument is not a number; the message names it.
        ValueError: there are too many metrics, or the name of one is too long.
    """
    given = {
        "epoch": epoch, "epochs": epochs, "step": step, "steps": steps, "loss": loss,
        "samples_per_second": samples_per_second, "eta": eta,
    }  # fmt: skip
    figures: dict[str, Any] = {
        _NUMBERS.get(name, name): _number(name, value) for name, value in given.items() if value is not None
    }
    others = {"accuracy": accuracy, **metrics, **_copied()}
    read = {name: _number(name, value) for name, value in others.items() if value is not None}
    _check_names(read)
    known = {name: value for name, value in read.items() if value is not None}
    if known:
        figures["metrics"] = known
    begin()  # Call it again, because the module may have been imported before this worker was forked.
    if figures:
        link.post(figures)
        curve_file.add(figures)


def checkpoint_dir(default: str | Path = "checkpoints") -> Path:
    """Return the job's checkpoint folder. Outside a job, create and return `default`."""
    folder = JobEnvironment.read().checkpoint_dir
    if folder:
        # Do not create the folder. If its volume were not mounted, the new folder would be on the
        # node's own disk.
        return Path(folder)
    made = Path(default)
    made.mkdir(parents=True, exist_ok=True)
    return made


def restore_checkpoint() -> Path | None:
    """Return the newest complete checkpoint that was given to `copy_checkpoint`; None if there is
    none.

    In a job with storage.checkpoints.url, the checkpoint is fetched from the bucket into
    `checkpoint_dir()` under its original name, once per pod. In all other cases, it is already in
    that folder. All ranks must call this before training, and all get the same checkpoint.

    Raises:
        ddpjob_bucket.BucketError: the bucket cannot be read, or the image lacks obstore. Training
            must not start from scratch while it is unknown whether there is a checkpoint.
        OSError, ValueError: the folder cannot be read or written, or its record of the newest
            checkpoint is damaged.
    """
    folder = checkpoint_dir()
    copies = _copies()
    if copies is not None:
        found: Path | None = copies.restore(folder)
        return found
    from ddpjob_report.copies import recorded

    job = JobEnvironment.read()
    if job.shares_checkpoints is False and job.has_several_nodes:
        return None  # Each node has its own folder, so the ranks would continue from different steps.
    return recorded(folder)


def copy_checkpoint(path: str | Path, step: int, *, keep: int = 3, wait: bool = False) -> None:
    """Copy a checkpoint (a file or a folder of files) to the job's bucket while training continues.

    Every rank may call it, but only rank 0's checkpoint is copied. A folder written by
    torch.distributed.checkpoint must contain the parts of all ranks.

    Args:
        path: a file or folder in `checkpoint_dir()` that is a complete checkpoint. After the call,
            you may replace or remove it, but not modify it in place: write to a different name,
            then use os.replace.
        step: number of steps completed. Of all checkpoints since the last start of the job, the one
            with the highest step counts as the newest.
        keep: how many of the newest checkpoints stay in the bucket.
        wait: return only when the checkpoint is in the bucket. If this is False, the script waits
            for the last copy when it ends.

    One checkpoint is uploaded at a time. If several are waiting, the newest one is uploaded next. A
    failed upload is retried after 1, 2, 4, ... 60 s. Readers see either a whole checkpoint or none.
    Without storage.checkpoints.url, and outside a job, nothing is copied: the checkpoint stays in
    the folder, where `restore_checkpoint` finds it.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        ddpjob_bucket.BucketError: the bucket cannot be read, the image lacks obstore, or a name has
            characters that are not allowed in a bucket.
        OSError: the checkpoint cannot be read.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"ddpjob_report.copy_checkpoint: path must be a path, not {path!r:.80}")
    number = as_number(step)
    if not isinstance(number, int) or not 0 <= number < 10**9:
        raise ValueError(
            f"ddpjob_report.copy_checkpoint: step must be a whole number from 0 to 999999999, not {step!r:.80}"
        )
    if not isinstance(keep, int) or keep < 1:
        raise ValueError(f"ddpjob_report.copy_checkpoint: keep must be a whole number of at least 1, not {keep!r:.80}")
    if not JobEnvironment.read().is_first:
        return
    saved, copies = Path(path), _copies()
    if not saved.exists():
        raise ValueError(f"ddpjob_report.copy_checkpoint: path {saved} does not exist")
    # The folder of all checkpoints is refused, because a copy of it would include checkpoints that
    # were restored from earlier copies.
    if checkpoint_dir().resolve().is_relative_to(saved.resolve()):
        raise ValueError(
            f"ddpjob_report.copy_checkpoint: path {saved} contains all checkpoints; pass the file or folder of one"
            " checkpoint"
        )
    if copies is None:
        from ddpjob_report.copies import record

        record(checkpoint_dir(), saved, number)
        return
    copies.copy(saved, number, keep)
    if wait:
        copies.finish(None)
    link.post({"metrics": _copied()})


def _copies() -> Any:
    """Return the module that copies checkpoints to a bucket; None if the job has no bucket."""
    if not JobEnvironment.read().checkpoint_url:
        return None
    from ddpjob_report import copies

    return copies


def _copied() -> dict[str, float]:
    """Return the figures about copies to a bucket; empty if this process has not made any copy."""
    copies = sys.modules.get("ddpjob_report.copies")
    return {} if copies is None else copies.figures()


def should_stop() -> bool:
    """Whether to save and exit now, because the pod of any rank was asked to stop.

    All ranks must call this at the same steps. If torch.distributed is initialized, every rank gets
    the same result, because the ranks exchange one number. The exchange uses gloo and does not wait
    for the GPU. After the first call, SIGTERM no longer ends the process.

    Raises:
        RuntimeError: another rank is gone.
    """
    return stop.agreed()


def saved_and_leave() -> NoReturn:
    """End this process. Call this once `should_stop()` has been true and the state has been saved.

    The exit does not count as a failure. All ranks must call this. The call waits for ranks that
    are still saving. It also waits for the last copy to the job's bucket, for as long as the pod's
    grace period allows.

    Raises:
        RuntimeError: it was called outside the main thread, where it would end only that thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "ddpjob_report.saved_and_leave: must be called in the main thread, because it ends the process"
        )
    copies = sys.modules.get("ddpjob_report.copies")
    if copies is not None:
        copies.leave(stop.seconds_left())
    link.close()
    curve_file.close()
    stop.wait_for_others()
    sys.exit(protocol.EXIT_STEPPED_ASIDE)


def as_number(value: Any) -> int | float | None:
    """Convert a number, or a tensor or array of one element, to a plain number.

    Return None for any other value.
    """
    if isinstance(value, (bool, str, bytes, bytearray)):
        return None
    # Detach a tensor, because torch warns if float() is called on a tensor that requires gradients.
    detach = getattr(value, "detach", None)
    try:
        return _plain(detach() if callable(detach) else value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def _number(name: str, value: Any) -> int | float | None:
    """Return the value of a figure as a number; None if it is infinite, undefined, or too large for
    a status.

    Raises TypeError if the value is not a number.
    """
    number = as_number(value)
    if number is None:
        shown = f"{value!r:.80}" if isinstance(value, (bool, str, bytes, int, float)) else f"a {type(value).__name__}"
        raise TypeError(f"ddpjob_report.report: {name} must be a number or a tensor of one element, not {shown}")
    return number if protocol.is_number(number) else None


def _plain(value: Any) -> int | float:
    item = getattr(value, "item", None)
    # Since numpy 2.4, float() refuses an array of one element, so use item().
    value = item() if callable(item) else value
    try:
        return operator.index(value)
    except TypeError:
        return float(value)


def _check_names(metrics: dict[str, Any]) -> None:
    if len(metrics) > protocol.MAX_FIGURES:
        raise ValueError(
            f"ddpjob_report.report: at most {protocol.MAX_FIGURES} metrics are allowed, not {len(metrics)}"
        )
    for name in metrics:
        if len(name) > protocol.MAX_FIGURES:
            most = f"must have at most {protocol.MAX_FIGURES} characters, not {len(name)}"
            raise ValueError(f"ddpjob_report.report: the name of a metric {most}: {name[:40]}...")

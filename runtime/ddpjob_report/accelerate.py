"""Connects Accelerate to a DDPJob.

accelerator = Accelerator(log_with=DDPJobTracker())
accelerator.init_trackers("job")
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
first = resume(accelerator)
for step in range(first, steps):
    ...
    take(accelerator, step + 1)
    accelerator.log({"loss": loss}, step=step + 1)
    stop = ddpjob_report.should_stop()
    if stop or (step + 1) % 1000 == 0:
        save(accelerator, step + 1)
    if stop:
        ddpjob_report.saved_and_leave()

`take` keeps the latest state in the nodes' memory. `resume` restores that state or the newest
checkpoint, whichever has more steps. The state includes everything passed to `accelerator.prepare`
and `register_for_checkpointing`, the scaler, the count of accumulated batches, and each rank's
random generators. A loader's position is included only with
`DataLoaderConfiguration(use_stateful_dataloader=True)`. Without that setting, call
`accelerator.skip_first_batches`, as after `load_state`. Models sharded by FSDP, DeepSpeed or
Megatron-LM are not kept in memory, so they continue from checkpoints.
"""

from __future__ import annotations

import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker
from ddpjob_pod.job_environment import JobEnvironment

from ddpjob_report import checkpoint_dir, copy_checkpoint, report
from ddpjob_report.node_memory import say
from ddpjob_report.resume import check_group, figures, listed, newest, step_of
from ddpjob_report.snapshots import Snapshots, sharding_of

_NAME, _UNFINISHED = "accelerate-step-", ".unfinished"
_SHARDED = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "TP", "XLA")


_kept: list[Snapshots | None] = []
"""A list whose only element is the object that keeps states in memory, or None if this model's
states are not kept. The list is empty until `resume` is called.
"""


class DDPJobTracker(GeneralTracker):  # type: ignore[misc]
    """Reports the values that a script passes to `accelerator.log`."""

    name = "ddpjob"
    requires_logging_directory = False

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    @property
    def tracker(self) -> Any:
        """Return this tracker itself. Accelerate asks for a wrapped library here, but there is
        none.
        """
        return self

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Do nothing, because DDPJob does not show hyperparameters."""

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        """Report the numeric values. Accelerate calls this in `accelerator.log`."""
        report(**{**figures(values), **({} if step is None else {"step": step})})


def save(accelerator: Any, step: int, folder: str | Path | None = None, keep: int = 2) -> None:
    """Save everything passed to `accelerator.prepare`, as the state after `step` steps.

    All ranks must call this. The state is first written under a different name and then renamed, so
    every state found after a crash is complete. The newest `keep` states are kept. In a job with a
    bucket, the state is also copied to the bucket.

    Raises:
        ValueError: Accelerate is set to name its checkpoints itself.
        RuntimeError: each rank trains its own model. On a machine without a GPU, this happens
            unless Accelerator(cpu=True) is used.
    """
    home = _home(accelerator, folder)
    made = home / f"{_NAME}{step}"
    unfinished = made.with_name(made.name + _UNFINISHED)
    if accelerator.is_main_process:
        shutil.rmtree(unfinished, ignore_errors=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(unfinished))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        if made.exists():
            shutil.rmtree(made)
        unfinished.rename(made)
        if JobEnvironment.read().checkpoint_url:
            copy_checkpoint(made, step, keep=keep)
        # A newer state exists now, so also delete the unfinished states of pods that were killed
        # while saving.
        states = sorted(_all(home.glob(f"{_NAME}*")), key=_step, reverse=True)
        for old in [*states[keep:], *home.glob(f"{_NAME}*{_UNFINISHED}")]:
            shutil.rmtree(old, ignore_errors=True)
    accelerator.wait_for_everyone()


def resume(accelerator: Any, folder: str | Path | None = None) -> int:
    """Load the latest state from `save` or `take`, and return its step; 0 if there is none.

    All ranks must call this once, after `accelerator.prepare` and `register_for_checkpointing`.

    Raises:
        ValueError: the state in memory does not fit the prepared objects, or Accelerate is set to
            name its checkpoints itself.
        RuntimeError: each rank trains its own model. On a machine without a GPU, this happens
            unless Accelerator(cpu=True) is used.
    """
    found = newest(_all(listed(_home(accelerator, folder), f"{_NAME}*")), _is_folder)
    # Wait until all ranks have searched, because a rank that saves also removes old states.
    accelerator.wait_for_everyone()
    snapshots, step = _snapshots(accelerator), step_of(found)
    _kept[:] = [snapshots]
    if snapshots is not None and snapshots.restored and snapshots.step > step:
        return snapshots.step
    if found is not None:
        accelerator.load_state(str(found))
    if snapshots is not None:
        snapshots.step = step
    return step


def take(accelerator: Any, step: int) -> None:
    """Keep the state after `step` steps in memory, if a copy is due.

    All ranks must call this after each step, like `ddpjob_report.Snapshots.take`.

    Raises:
        RuntimeError: `resume` was not called, or a rank is gone.
        TypeError, ValueError: `step` is invalid, or a state cannot be kept; the message says which.
    """
    if not _kept:
        raise RuntimeError(
            "ddpjob_report.accelerate: take() was called before resume(); call resume(accelerator) once, "
            "after accelerator.prepare()"
        )
    if _kept[0] is not None:
        _kept[0].take(step)


def _snapshots(accelerator: Any) -> Snapshots | None:
    """Create the object that keeps states in memory.

    The object restores the state in memory, if there is one, when it is created. Return None if the
    job does not keep states, or if this model's states cannot be kept.
    """
    job = JobEnvironment.read()
    if not job.may_have_snapshots:
        return None
    objects = {
        f"{kind}{number}": thing
        for kind, things in (
            ("model", accelerator._models),
            ("optimizer", accelerator._optimizers),
            ("scheduler", accelerator._schedulers),
            ("loader", [each for each in accelerator._dataloaders if getattr(each, "use_stateful_dataloader", False)]),
            ("registered", accelerator._custom_objects),
        )
        for number, thing in enumerate(things)
    }
    kind = str(accelerator.distributed_type.value)
    sharding = kind if kind in _SHARDED else next(filter(None, map(sharding_of, objects.values())), "")
    if sharding or not objects:
        why = (
            f"the model is sharded by {sharding}"
            if sharding
            else "accelerator.prepare() was not called before resume()"
        )
        if job.snapshot_folder:
            say(f"no state is kept in memory, because {why}; a restart continues from the newest checkpoint")
        return None
    if accelerator.scaler is not None:
        objects["scaler"] = accelerator.scaler
    return Snapshots(**objects, batches=_Batches(accelerator))


class _Batches:
    """Accelerate's count of batches, as an object with a state dict. Accelerate uses the count to
    decide when accumulated gradients are complete.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._accelerator.step = state["step"]


def _home(accelerator: Any, folder: str | Path | None) -> Path:
    remedy = "without a GPU, pass Accelerator(cpu=True) or set ACCELERATE_USE_CPU=true"
    check_group("Accelerate", accelerator.num_processes, remedy)
    if accelerator.project_configuration.automatic_checkpoint_naming:
        raise ValueError(
            "ddpjob_report.accelerate: set automatic_checkpoint_naming=False in ProjectConfiguration, because "
            "otherwise Accelerate saves to a folder of its own choice"
        )
    return checkpoint_dir() if folder is None else Path(folder)


def _all(paths: Iterable[Path]) -> Iterator[Path]:
    """Return the folders of the states that `save` has completed. Unfinished states and other files
    are left out.
    """
    return (path for path in paths if re.fullmatch(r"[0-9]+", path.name[len(_NAME) :]))


def _is_folder(path: Path) -> bool:
    """Whether a path is a folder. Raises OSError if that is unknown.

    Since Python 3.14, Path.is_dir returns False in this case.
    """
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        return False


def _step(path: Path) -> int:
    return int(path.name[len(_NAME) :])

"""Accelerate in a DDPJob.

accelerator = Accelerator(log_with=DDPJobTracker())
accelerator.init_trackers("job")
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
first = resume(accelerator)
for step in range(first, steps):
    ...
    accelerator.log({"loss": loss}, step=step + 1)
    stop = ddpjob_report.should_stop()
    if stop or (step + 1) % 1000 == 0:
        save(accelerator, step + 1)
    if stop:
        ddpjob_report.saved_and_leave()
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker
from ddpjob_pod.job_environment import JobEnvironment

from ddpjob_report import checkpoint_dir, copy_checkpoint, report
from ddpjob_report.resume import check_group, figures, newest

_NAME, _UNFINISHED = "accelerate-step-", ".unfinished"


class DDPJobTracker(GeneralTracker):  # type: ignore[misc]
    """Reports the values that `accelerator.log` logs."""

    name = "ddpjob"
    requires_logging_directory = False

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    @property
    def tracker(self) -> Any:
        """Return this tracker, because it wraps no other library."""
        return self

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Do nothing, because hyperparameters are not shown."""

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        """Report the values passed to `accelerator.log`."""
        report(**{**figures(values), **({} if step is None else {"step": step})})


def save(accelerator: Any, step: int, folder: str | Path | None = None, keep: int = 2) -> None:
    """Save everything that `accelerator.prepare` was given, as the state after `step` steps.

    All ranks call it. The state is first written under a different name, so that a state found
    after a crash is complete. The newest `keep` states are kept. In a job with a bucket, the state
    is copied as well.

    Raises:
        ValueError: Accelerate is set to name its checkpoints itself.
        RuntimeError: each rank trains its own model, as without a GPU and Accelerator(cpu=True).
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
        # Also delete leftovers of saves during which the pods were killed, now that there is a
        # newer state.
        for old in [*sorted(_all(home), key=_step, reverse=True)[keep:], *home.glob(f"{_NAME}*{_UNFINISHED}")]:
            shutil.rmtree(old, ignore_errors=True)
    accelerator.wait_for_everyone()


def resume(accelerator: Any, folder: str | Path | None = None) -> int:
    """Load the newest state that `save` wrote. Return its step; 0 if there is none.

    Call it after `accelerator.prepare`.

    Raises:
        ValueError: Accelerate is set to name its checkpoints itself.
        RuntimeError: each rank trains its own model, as without a GPU and Accelerator(cpu=True).
    """
    found = newest(_all(_home(accelerator, folder)), Path.is_dir)
    accelerator.wait_for_everyone()  # No rank may save (which removes old states) before all have looked.
    if found is None:
        return 0
    accelerator.load_state(str(found))
    return _step(found)


def _home(accelerator: Any, folder: str | Path | None) -> Path:
    remedy = "without a GPU it needs Accelerator(cpu=True), or the variable ACCELERATE_USE_CPU=true"
    check_group("Accelerate", accelerator.num_processes, remedy)
    if accelerator.project_configuration.automatic_checkpoint_naming:
        raise ValueError(
            "ddpjob_report.accelerate: set automatic_checkpoint_naming=False in ProjectConfiguration: "
            "with it Accelerate saves to a folder of its own choice"
        )
    return checkpoint_dir() if folder is None else Path(folder)


def _all(folder: Path) -> list[Path]:
    """Return the states that `save` has completed, not unfinished states or other files."""
    return [path for path in folder.glob(f"{_NAME}*") if re.fullmatch(r"[0-9]+", path.name[len(_NAME) :])]


def _step(path: Path) -> int:
    return int(path.name[len(_NAME) :])

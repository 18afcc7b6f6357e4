"""Hugging Face's Trainer in a DDPJob.

folder = ddpjob_report.checkpoint_dir()
trainer = Trainer(..., args=TrainingArguments(output_dir=str(folder), ...), callbacks=[DDPJobCallback()])
trainer.train(resume_from_checkpoint=last_checkpoint(folder))
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from ddpjob_pod.job_environment import JobEnvironment
from transformers import TrainerCallback

from ddpjob_report import copy_checkpoint, report, saved_and_leave, should_stop
from ddpjob_report.resume import check_group, figures, newest


class DDPJobCallback(TrainerCallback):  # type: ignore[misc]
    """Reports steps and the Trainer's logs. When a pod is asked to end, saves and exits."""

    def __init__(self) -> None:
        self._leaving = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Check the group before the first step, on all ranks.

        Warns if the Trainer does not resume in its checkpoint's epoch.

        Raises:
            RuntimeError: each rank trains its own model, as without a GPU and `use_cpu=True`.
        """
        remedy = "without a GPU it needs TrainingArguments(use_cpu=True), or the variable ACCELERATE_USE_CPU=true"
        check_group("the Trainer", args.world_size, remedy)
        if args.max_steps > 0 or not (state.global_step and state.max_steps and state.is_world_process_zero):
            return
        left_at, per_step = state.epoch or 0, args.num_train_epochs / state.max_steps
        begun_at = min(state.global_step * per_step, args.num_train_epochs)
        if abs(begun_at - left_at) > (left_at + 2) * per_step:  # an epoch may have one step more or less
            sys.stderr.write(
                f"ddpjob_report: warning: the checkpoint is of epoch {left_at:.2f}, and training continues at epoch "
                f"{begun_at:.2f} of {args.num_train_epochs:g}: an epoch has another number of steps now. With another "
                "number of ranks keep the global batch: divide gradient_accumulation_steps by it\n"
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Report an optimizer step and check whether to stop, on all ranks."""
        epochs = -(-args.num_train_epochs // 1) if args.max_steps <= 0 else None
        epoch = min(max(1, math.ceil(state.epoch or 0)), epochs or 2**53)  # 1.0 means the first epoch has just ended
        report(epoch=epoch, epochs=epochs, step=state.global_step, steps=state.max_steps)
        if should_stop():
            self._leaving = True
            control.should_save, control.should_evaluate = True, False
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Report what the Trainer logs: `loss`, and `eval_accuracy` after an evaluation."""
        values = figures(logs or {})
        values.pop("epoch", None)
        if "eval_accuracy" in values:
            values["accuracy"] = values.pop("eval_accuracy")
        if state.global_step:  # Curves are indexed by step, and the final figures have no later step.
            values["step"] = state.global_step
        report(**values)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Copy a new checkpoint in a job with a bucket, and exit if asked to.

        Called on all ranks.
        """
        made = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and JobEnvironment.read().checkpoint_url and made.is_dir():
            copy_checkpoint(made, state.global_step)
        if self._leaving:
            saved_and_leave()


def last_checkpoint(folder: str | Path) -> str | None:
    """Return the newest whole checkpoint in the Trainer's output folder; None if there is none.

    It is meant for `resume_from_checkpoint`.
    """
    found = newest(Path(folder).glob("checkpoint-*"), _is_whole)
    return None if found is None else str(found)


def _is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint is whole: the Trainer writes its own state last."""
    try:
        return isinstance(json.loads((checkpoint / "trainer_state.json").read_text()), dict)
    except (OSError, ValueError):
        return False

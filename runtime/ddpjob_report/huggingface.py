"""Connects Hugging Face's Trainer to a DDPJob.

folder = ddpjob_report.checkpoint_dir()
args = TrainingArguments(output_dir=str(folder), ...)
trainer = Trainer(..., args=args, callbacks=[DDPJobCallback()])
trainer.train(resume_from_checkpoint=last_checkpoint(folder))

The callback keeps the latest state in the nodes' memory. If that state is newer than the folder's
checkpoints, `last_checkpoint` returns it as a checkpoint. The state consists of weights, optimizer,
scheduler, scaler, the Trainer's own state, and each rank's random generators. As with any
checkpoint, the Trainer finds its position in the data by counting steps. The state after a step is
taken only when the next step or epoch begins, so it includes the log and the evaluation that
followed the step.

The state does not include random generators in data-loader processes, rank-specific buffers, or
changes to other callbacks since the last checkpoint. An example of such a change is the patience of
EarlyStoppingCallback with `restore_callback_states_from_checkpoint`. Models sharded by FSDP or
DeepSpeed are not kept in memory, so they continue from checkpoints.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pickle
import random
import sys
from pathlib import Path
from typing import Any

from ddpjob_pod.job_environment import JobEnvironment
from ddpjob_pod.rank_snapshots import Restored
from transformers import TrainerCallback

from ddpjob_report import copy_checkpoint, report, saved_and_leave, should_stop
from ddpjob_report.node_memory import FrameworkMemory, as_checkpoint, say
from ddpjob_report.resume import check_group, figures, listed, newest, step_of
from ddpjob_report.snapshots import bare, sharding_of


class DDPJobCallback(TrainerCallback):  # type: ignore[misc]
    """Reports steps and the Trainer's logs, and keeps the latest state in memory.

    When a pod is asked to stop, the callback makes the Trainer save a checkpoint, and then ends the
    process.
    """

    def __init__(self) -> None:
        self._leaving = False
        self._memory: FrameworkMemory | None = None
        self._taken = 0
        """The last step whose state was taken. Until a state is taken, the step that training
        continued from.
        """

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Check that the ranks form a group, and record the step that training continues from.

        Runs on all ranks. Warns if the Trainer would not continue in the epoch in which its
        checkpoint was saved.

        Raises:
            RuntimeError: each rank trains its own model. On a machine without a GPU, this happens
                unless `use_cpu=True` is set.
        """
        remedy = "without a GPU, pass TrainingArguments(use_cpu=True) or set ACCELERATE_USE_CPU=true"
        check_group("the Trainer", args.world_size, remedy)
        self._taken = state.global_step
        if sharding := _sharding(args, given):
            say(
                f"no state is kept in memory, because the model is sharded by {sharding}; a restart continues from "
                "the newest checkpoint"
            )
        else:
            self._memory = FrameworkMemory.begin(state.global_step)
        if args.max_steps > 0 or not (state.global_step and state.max_steps and state.is_world_process_zero):
            return
        left_at, per_step = state.epoch or 0, args.num_train_epochs / state.max_steps
        begun_at = min(state.global_step * per_step, args.num_train_epochs)
        # Allow for an epoch that has become one step longer or shorter since the last run.
        if abs(begun_at - left_at) > (left_at + 2) * per_step:
            sys.stderr.write(
                f"ddpjob_report: warning: the checkpoint was saved at epoch {left_at:.2f}, but training continues at "
                f"epoch {begun_at:.2f} of {args.num_train_epochs:g}, because the number of steps per epoch has "
                "changed. If the "
                "number of ranks changed, scale gradient_accumulation_steps to keep the global batch size\n"
            )

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Take the state after the last step of the previous epoch, on all ranks."""
        self._take(args, state, given)

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Take the state after the previous step, on all ranks.

        When the Trainer resumes, it restores a checkpoint's random generators after it has fetched
        the first batch. So this method, which is called after a batch has been fetched, takes the
        states of the generators.
        """
        self._take(args, state, given)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Report an optimizer step, and check whether to stop. Runs on all ranks."""
        if self._memory is not None:
            self._memory.forget()
            self._memory.note(state.global_step)
        epochs = -(-args.num_train_epochs // 1) if args.max_steps <= 0 else None
        # An epoch of 1.0 means that the first epoch has just ended.
        epoch = min(max(1, math.ceil(state.epoch or 0)), epochs or 2**53)
        report(epoch=epoch, epochs=epochs, step=state.global_step, steps=state.max_steps)
        if should_stop():
            self._leaving = True
            control.should_save, control.should_evaluate = True, False
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Report the figures that the Trainer logs, such as `loss`, and `eval_accuracy` after an
        evaluation.
        """
        values = figures(logs or {})
        values.pop("epoch", None)
        if "eval_accuracy" in values:
            values["accuracy"] = values.pop("eval_accuracy")
        # Curves are indexed by step. The final figures have no step of their own, so give them the
        # last one.
        if state.global_step:
            values["step"] = state.global_step
        report(**values)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Copy a new checkpoint to the job's bucket, if any. Exit if the pod was asked to stop.

        Runs on all ranks.
        """
        made = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and JobEnvironment.read().checkpoint_url and made.is_dir():
            copy_checkpoint(made, state.global_step)
        if self._leaving:
            saved_and_leave()

    def _take(self, args: Any, state: Any, given: dict[str, Any]) -> None:
        if self._memory is None or state.global_step == self._taken:
            return
        self._taken = state.global_step
        self._memory.take(state.global_step, lambda: _state(state, given), lambda: pickle.dumps(_generators(args)))


def last_checkpoint(folder: str | Path) -> str | None:
    """Return the path of the latest state, for `resume_from_checkpoint`; None if there is no state.

    The latest state is either a complete checkpoint in the Trainer's output folder, or the state in
    the nodes' memory. If the state in memory has more steps, it is written as a checkpoint. All
    ranks must call this.

    Raises OSError if the folder or its newest checkpoint cannot be read, or if the state in memory
    cannot be written to a file.
    """
    found = newest(listed(folder, "checkpoint-*"), _is_whole)
    kept = as_checkpoint(step_of(found), "checkpoint-{step}", _write)
    best = kept or found
    return None if best is None else str(best)


def _sharding(args: Any, given: dict[str, Any]) -> str:
    """Return the name of the library or method that shards the model; empty if every rank has the
    whole model.
    """
    if not JobEnvironment.read().snapshot_folder:
        return ""
    if getattr(args, "deepspeed", None):
        return "DeepSpeed"
    return sharding_of(given.get("model")) or sharding_of(given.get("optimizer"))


def _state(state: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the state that the Trainer would save in a checkpoint, except for
    random generators.
    """
    scaler = getattr(given["optimizer"], "scaler", None)
    return {
        "model": bare(given["model"]).state_dict(),
        "optimizer": given["optimizer"].state_dict(),
        "scheduler": given["lr_scheduler"].state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "trainer": {field.name: getattr(state, field.name) for field in dataclasses.fields(state)},
    }


def _generators(args: Any) -> dict[str, Any]:
    """Return the states of this rank's random generators, in the form that the Trainer saves."""
    import numpy as np
    import torch

    states = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}
    cuda: Any = torch.cuda
    if cuda.is_available():
        states["cuda"] = cuda.get_rng_state_all() if args.world_size > 1 else cuda.get_rng_state()
    return states


def _write(checkpoint: Path, found: Restored) -> None:
    """Write a state as a checkpoint in the Trainer's format.

    The Trainer's own state is written last, so a checkpoint that contains it is complete.
    """
    import torch
    from safetensors.torch import save_file

    state: dict[str, Any] = found.tree
    checkpoint.mkdir()
    weights = {name: weight.contiguous() for name, weight in state["model"].items()}
    save_file(weights, str(checkpoint / "model.safetensors"), metadata={"format": "pt"})
    for name in ("optimizer", "scheduler", "scaler"):
        if state[name] is not None:
            torch.save(state[name], checkpoint / f"{name}.pt")
    for rank, own in found.owns.items():
        name = "rng_state.pth" if os.environ.get("WORLD_SIZE", "1") == "1" else f"rng_state_{rank}.pth"
        torch.save(pickle.loads(own), checkpoint / name)
    (checkpoint / "trainer_state.json").write_text(json.dumps(state["trainer"], indent=2, sort_keys=True))


def _is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint is complete: the Trainer's own state, which is written last, must be
    valid.

    Raises OSError if that file exists but cannot be read.
    """
    state = checkpoint / "trainer_state.json"
    try:
        return isinstance(json.loads(state.read_text()), dict)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(state)) from error  # Reads do not name the file.

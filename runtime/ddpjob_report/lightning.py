"""Connects Lightning to a DDPJob.

folder = ddpjob_report.checkpoint_dir()
saving = ModelCheckpoint(dirpath=folder, every_n_train_steps=1000)
trainer = Trainer(..., callbacks=[saving, DDPJobCallback()])
trainer.fit(model, data, ckpt_path=last_checkpoint(folder))

The callback keeps the latest state in the nodes' memory. If that state is newer than the folder's
checkpoints, `last_checkpoint` returns it as a checkpoint. The state consists of everything that
`trainer.save_checkpoint` would write (model, optimizers, schedulers, scaler, loops, callbacks, data
module), and each rank's random generators.

If a state was taken within an epoch, Lightning itself would repeat the epoch's first batches. If
the data loader has a sampler and does not restore a state itself, the callback makes the loader
skip these batches. The same applies to a restart from a checkpoint. The order of the samples stays
the same if it depends only on the epoch, as with DistributedSampler. The state after an epoch's
last step is taken at the end of the epoch, because Lightning cannot continue a second time from a
state between that step and the end.

The state does not include gradients that are being accumulated, changes made in the model's
`on_train_epoch_end`, random generators in data-loader processes, or steps of optimizers that
Lightning does not count (`trainer.global_step` stays 0). Models sharded by FSDP or DeepSpeed are
not kept in memory, so they continue from checkpoints.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import pickle
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpjob_pod.job_environment import JobEnvironment
from ddpjob_pod.rank_snapshots import Restored

from ddpjob_report import checkpoint_dir, copy_checkpoint, report, saved_and_leave, should_stop
from ddpjob_report.node_memory import FrameworkMemory, as_checkpoint, say
from ddpjob_report.resume import check_group, figures, listed, newest, step_of
from ddpjob_report.snapshots import generators, set_generators, sharding_of

_OLD_NAME = "lightning" not in sys.modules and (
    "pytorch_lightning" in sys.modules or importlib.util.find_spec("lightning") is None
)
if TYPE_CHECKING or not _OLD_NAME:
    from lightning.pytorch.callbacks import Callback
else:
    from pytorch_lightning.callbacks import Callback

_STOPPED = "stopped-step="


class DDPJobCallback(Callback):  # type: ignore[misc]
    """Reports steps, the loss and the model's logged values, and keeps the latest state in memory.

    When a pod is asked to stop, the callback saves a checkpoint and exits. In a job with a bucket,
    the checkpoint is also copied to the bucket. `folder` is the folder for this checkpoint; None
    means the job's checkpoint folder.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = folder
        self._step = 0
        """The number of optimizer steps when the ranks last checked whether to stop."""
        self._memory: FrameworkMemory | None = None
        self._taken = 0
        """The last step whose state was taken. Until a state is taken, the step that training
        continued from.
        """
        self._generators: bytes = b""
        """Pickled states of the random generators, to be restored once the first batch has been
        fetched; empty if there are none to restore.
        """

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Check that the ranks form a group, and record the step that training continues from.

        Runs on all ranks.

        Raises:
            RuntimeError: each rank trains its own model, for example because `strategy="ddp"` and
                `num_nodes` are missing.
        """
        sizes = {"num_nodes": "GROUP_WORLD_SIZE", "devices": "LOCAL_WORLD_SIZE"}
        given = ", ".join(f'{name}=int(os.environ.get("{variable}", 1))' for name, variable in sizes.items())
        check_group("Lightning", trainer.world_size, f'set Trainer(strategy="ddp", {given})')
        self._step = self._taken = trainer.global_step
        if sharding := _sharding(trainer):
            say(
                f"no state is kept in memory, because the model is sharded by {sharding}; a restart continues from "
                "the newest checkpoint"
            )
        else:
            self._memory = FrameworkMemory.begin(trainer.global_step)
        if self._memory is not None:
            self._generators = self._memory.own
            self._memory.forget()
        self._continue_data(trainer)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Restore the random generators before the first batch after a restart.

        Later calls do nothing.
        """
        self._set_generators()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """Take the state after the last step of an epoch, on all ranks."""
        self._take(trainer)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Report the step after a batch, take its state, and check whether to stop. Runs on all
        ranks.

        The loss is read only as often as Lightning logs it, and after the first and the last batch
        of an epoch, because an epoch may be shorter than the interval between two logs.
        """
        values: dict[str, Any] = {}
        every = trainer.log_every_n_steps
        if every and (batch_idx == 0 or (batch_idx + 1) % every == 0 or trainer.is_last_batch):
            values = figures(trainer.callback_metrics)
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            if loss is not None:
                values.update(figures({"loss": loss * trainer.accumulate_grad_batches}))
        report(**{**values, **_counts(trainer)})
        if module.automatic_optimization and trainer.global_step == self._step:
            # No optimizer step was taken. Do not stop now, because a checkpoint would lack the
            # accumulated gradients.
            return
        self._step = trainer.global_step
        if self._memory is not None:
            self._memory.note(self._step)
            if not trainer.is_last_batch:
                self._take(trainer)
        if should_stop():
            folder = checkpoint_dir() if self._folder is None else Path(self._folder)
            made = folder / f"{_STOPPED}{trainer.global_step}.ckpt"
            trainer.save_checkpoint(made)
            if trainer.is_global_zero:
                for old in folder.glob(f"{_STOPPED}*.ckpt"):
                    if old != made:
                        old.unlink()
                # `keep` has no limit here, because the script decides how many copies stay in the
                # bucket.
                if JobEnvironment.read().checkpoint_url:
                    copy_checkpoint(made, trainer.global_step, keep=sys.maxsize)
            saved_and_leave()

    def _take(self, trainer: Any) -> None:
        if self._memory is not None and trainer.global_step != self._taken:
            self._taken = trainer.global_step
            self._memory.take(self._taken, lambda: _state(trainer), lambda: pickle.dumps(generators()))

    def _set_generators(self) -> None:
        if self._generators:
            set_generators(pickle.loads(self._generators))
            self._generators = b""

    def _continue_data(self, trainer: Any) -> None:
        """Make the data loaders continue where the state was taken.

        If the state was taken within an epoch, the loaders skip the epoch's first batches. If it
        was taken at the end of an epoch, the loaders begin the next epoch, with the samples in the
        same order as without a restart.
        """
        loaders, fetcher = _leaves(trainer.train_dataloader), getattr(trainer.fit_loop, "_data_fetcher", None)
        if not trainer.global_step or fetcher is None or any(hasattr(each, "load_state_dict") for each in loaders):
            return  # Lightning itself restores loaders that have a state.
        done = trainer.fit_loop.epoch_loop.batch_progress.current.processed
        is_within = 0 < done < trainer.num_training_batches
        for batches in filter(None, (getattr(each, "batch_sampler", None) for each in loaders)):
            if not hasattr(batches, "sampler"):
                continue
            # Do this now, because a loader's processes draw samples as soon as the loader is
            # iterated.
            if hasattr(batches.sampler, "set_epoch"):
                batches.sampler.set_epoch(trainer.current_epoch)
            if is_within and isinstance(getattr(batches, "batch_size", None), int):
                batches.sampler = _Rest(batches.sampler, done * batches.batch_size)
        if not is_within:
            self._set_generators()
        iter(fetcher)  # Start iterating again, because Lightning started before it called any callback.

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        """Report the results of an evaluation. `val_accuracy` or `val_acc` is shown as accuracy."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return  # `trainer.validate` is not a part of training, so its trainer has not taken any steps.
        values = figures(trainer.callback_metrics)
        for name in ("val_acc", "val_accuracy"):
            if name in values:
                values["accuracy"] = values[name]
        report(**{**values, **_counts(trainer)})


class _Rest:
    """A sampler that skips the first `done` samples, but only the first time it is iterated."""

    def __init__(self, sampler: Any, done: int) -> None:
        self._sampler, self._done = sampler, done

    def __iter__(self) -> Iterator[Any]:
        done, self._done = self._done, 0
        return itertools.islice(self._sampler, done, None)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


def _leaves(loaders: Any) -> list[Any]:
    """Return a flat list of a model's loaders, which may be given as one loader or in nested lists
    and dicts.
    """
    if isinstance(loaders, dict):
        loaders = list(loaders.values())
    if isinstance(loaders, (list, tuple)):
        return [leaf for each in loaders for leaf in _leaves(each)]
    return [loaders]


def last_checkpoint(folder: str | Path) -> str | None:
    """Return the path of the latest state, for `ckpt_path`; None if there is no state.

    The latest state is either a complete checkpoint in the folder, or the state in the nodes'
    memory. If the state in memory has more steps, it is written as a checkpoint. Checkpoints in the
    folder are ordered by the number at the end of their names, as in ModelCheckpoint's
    `{epoch}-{step}`. All ranks must call this.

    Raises OSError if the folder or its newest checkpoint cannot be read, or if the state in memory
    cannot be written to a file.
    """
    found = newest(listed(folder, "*.ckpt"), _is_whole)
    kept = as_checkpoint(step_of(found), "memory-step={step}.ckpt", _write)
    best = kept or found
    return None if best is None else str(best)


def _is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint is a complete file; False for a folder.

    Raises OSError if the file cannot be read. `is_zipfile` returns False in this case.
    """
    try:
        with checkpoint.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16)))
            file.read()
            return zipfile.is_zipfile(file)
    except (FileNotFoundError, IsADirectoryError):
        return False
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(checkpoint)) from error  # Reads do not name the file.


def _sharding(trainer: Any) -> str:
    """Return the name of the strategy or library that shards the model; empty if every rank has the
    whole model.
    """
    if not JobEnvironment.read().snapshot_folder:
        return ""
    strategy = type(trainer.strategy).__name__
    if "FSDP" in strategy or "DeepSpeed" in strategy:
        return strategy
    return next(filter(None, map(sharding_of, (trainer.model, *trainer.optimizers))), "")


def _state(trainer: Any) -> dict[str, Any]:
    """Return the state that `trainer.save_checkpoint` would write.

    The state comes from a private function, because Lightning's public function writes a file.
    """
    made: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    return made


def _write(checkpoint: Path, found: Restored) -> None:
    import torch

    torch.save(found.tree, checkpoint)


def _counts(trainer: Any) -> dict[str, Any]:
    steps = trainer.estimated_stepping_batches  # This is infinite or -1 if the length of the data is unknown.
    endless = trainer.max_epochs is None or trainer.max_epochs < 0
    return {
        "epoch": trainer.current_epoch + 1,
        "epochs": None if endless else trainer.max_epochs,
        "step": trainer.global_step,
        "steps": steps if 0 < steps < float("inf") else None,
    }

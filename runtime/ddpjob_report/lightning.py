"""Lightning in a DDPJob.

folder = ddpjob_report.checkpoint_dir()
saving = ModelCheckpoint(dirpath=folder, every_n_train_steps=1000)
trainer = Trainer(..., callbacks=[saving, DDPJobCallback()])
trainer.fit(model, data, ckpt_path=last_checkpoint(folder))
"""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpjob_pod.job_environment import JobEnvironment

from ddpjob_report import checkpoint_dir, copy_checkpoint, report, saved_and_leave, should_stop
from ddpjob_report.resume import check_group, figures, newest

_OLD_NAME = "lightning" not in sys.modules and (
    "pytorch_lightning" in sys.modules or importlib.util.find_spec("lightning") is None
)
if TYPE_CHECKING or not _OLD_NAME:
    from lightning.pytorch.callbacks import Callback
else:
    from pytorch_lightning.callbacks import Callback

_STOPPED = "stopped-step="


class DDPJobCallback(Callback):  # type: ignore[misc]
    """Reports steps, the loss, and what the model logs.

    When a pod is asked to end, it saves a checkpoint (which is copied in a job with a bucket) and
    exits. `folder`: the folder for that checkpoint; None means the job's checkpoint folder.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = folder
        self._step = 0
        """The number of optimizer steps when the ranks last checked whether to stop."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Check the group before the first batch, on all ranks.

        Raises:
            RuntimeError: each rank trains its own model, as without `strategy="ddp"` and
            `num_nodes`.
        """
        given = 'num_nodes=int(os.environ["GROUP_WORLD_SIZE"]), devices=int(os.environ["LOCAL_WORLD_SIZE"])'
        check_group("Lightning", trainer.world_size, f'set Trainer(strategy="ddp", {given})')
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Report a batch, on all ranks. The loss is read only as often as Lightning logs."""
        values: dict[str, Any] = {}
        if trainer.log_every_n_steps and (batch_idx + 1) % trainer.log_every_n_steps == 0:
            values = figures(trainer.callback_metrics)
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            if loss is not None:
                values.update(figures({"loss": loss * trainer.accumulate_grad_batches}))
        report(**{**values, **_counts(trainer)})
        if module.automatic_optimization and trainer.global_step == self._step:
            return  # Accumulated gradients are not in a checkpoint, so a stop waits for their step.
        self._step = trainer.global_step
        if should_stop():
            folder = checkpoint_dir() if self._folder is None else Path(self._folder)
            made = folder / f"{_STOPPED}{trainer.global_step}.ckpt"
            trainer.save_checkpoint(made)
            if trainer.is_global_zero:
                for old in folder.glob(f"{_STOPPED}*.ckpt"):
                    if old != made:
                        old.unlink()
                if JobEnvironment.read().checkpoint_url:  # The script's own copies determine how many are kept there.
                    copy_checkpoint(made, trainer.global_step, keep=sys.maxsize)
            saved_and_leave()

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        """Report an evaluation. `val_accuracy` and `val_acc` are shown as accuracy."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return  # `trainer.validate` is not part of the training: its trainer has no steps.
        values = figures(trainer.callback_metrics)
        for name in ("val_acc", "val_accuracy"):
            if name in values:
                values["accuracy"] = values[name]
        report(**{**values, **_counts(trainer)})


def last_checkpoint(folder: str | Path) -> str | None:
    """Return the folder's newest whole checkpoint for `ckpt_path`; None if there is none.

    The newest checkpoint has the highest number at the end of its name, as in ModelCheckpoint's
    `{epoch}-{step}`.
    """
    found = newest(Path(folder).glob("*.ckpt"), zipfile.is_zipfile)
    return None if found is None else str(found)


def _counts(trainer: Any) -> dict[str, Any]:
    steps = trainer.estimated_stepping_batches  # infinite, or -1 if the length of the data is unknown
    endless = trainer.max_epochs is None or trainer.max_epochs < 0
    return {
        "epoch": trainer.current_epoch + 1,
        "epochs": None if endless else trainer.max_epochs,
        "step": trainer.global_step,
        "steps": steps if 0 < steps < float("inf") else None,
    }

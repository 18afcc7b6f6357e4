"""`python -m ddpjob_trainer evaluate CHECKPOINT [key=value ...]` tests a checkpoint.

The command evaluates the checkpoint on the test set, with any number of ranks.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from ddpjob_pod import late_dynamo
from torch import nn

from ddpjob_trainer import config
from ddpjob_trainer.checkpoints import compatibility
from ddpjob_trainer.checkpoints.index import prepare_folder
from ddpjob_trainer.data.catalog import open_data
from ddpjob_trainer.data.corrupt import check_test_images
from ddpjob_trainer.data.dataset import DataSet
from ddpjob_trainer.data.sampler import DataShare
from ddpjob_trainer.distributed import devices
from ddpjob_trainer.distributed.init_method import join_group
from ddpjob_trainer.distributed.process_group import Group, done_in_thread
from ddpjob_trainer.errors import CheckpointError
from ddpjob_trainer.evaluation.accumulate import Evaluation, open_accumulator
from ddpjob_trainer.evaluation.evaluate import evaluate
from ddpjob_trainer.evaluation.result_files import FOLDER, EvaluationFiles
from ddpjob_trainer.evaluation.views import over_views
from ddpjob_trainer.lifecycle.signals import StopRequest
from ddpjob_trainer.model.models import build_model, explain_image_size
from ddpjob_trainer.optim.loss import Loss
from ddpjob_trainer.reporting.callbacks import Callbacks

_OF_A_CHECKPOINT = (
    "data.",
    "model.",
    "eval.",
    "optim.loss",
    "train.callbacks",
    "train.eval_batch",
    "train.backend",
    "train.threads",
    "train.timeout_seconds",
)
"""Prefixes of the keys that take their values from the checkpoint's configuration. A file or an
argument can still override such a key.
"""


def main(arguments: list[str]) -> int:
    """Run the command, possibly as one of torchrun's ranks, and return the exit code.

    Raises TrainerError.
    """
    parser = argparse.ArgumentParser(
        prog="python -m ddpjob_trainer evaluate",
        description="Evaluate a checkpoint on its test set, in float32, with the configuration that it was "
        "trained with. If there is a moving average of the weights, it is evaluated instead, as in "
        "training.",
    )
    parser.add_argument(
        "checkpoint",
        type=Path,
        help="a checkpoint (file or folder), a folder of checkpoints (for the best or newest of them), or a state dict",
    )
    parser.add_argument(
        "values", nargs="*", metavar="key=value", help="settings to change, such as data.dir=DIR eval.pr=exact"
    )
    parser.add_argument(
        "--config", help="configuration file; required for a plain state dict, which does not contain one"
    )
    parser.add_argument(
        "-o", "--output", type=Path, help=f"folder for the results; default: {FOLDER} next to the checkpoint"
    )
    options = parser.parse_intermixed_args(arguments)
    late_dynamo.put_off()
    group = Group.from_env()
    first = config.load(options.config, options.values)
    placement = devices.choose(first.train.backend, group.local_rank)
    with join_group(group, placement, first.train.timeout_seconds):
        snapshot = _read(options.checkpoint, group)
        if group.rank == 0:
            prepare_folder(_folder(options), "--output")
        was = {key: value for key, value in snapshot["config"].items() if key.startswith(_OF_A_CHECKPOINT)}
        settings = config.load(options.config, options.values, base=was)
        devices.limit_threads(settings.train.threads, group.local_world)
        data = open_data(settings.data, placement.device)
        result = _evaluate(settings, data, snapshot["model"], options.checkpoint, placement.device, group)
        if group.rank == 0:
            files = EvaluationFiles(_folder(options), settings.eval, data.class_names)
            _publish(result, files, options.checkpoint, snapshot["step"])
    return 0


def _read(path: Path, group: Group) -> dict[str, Any]:
    """Return `{"model": {name: tensor}, "config": {key: value}, "step": number}` on every rank.

    Only rank 0 reads the checkpoint. If the checkpoint contains a moving average of the weights
    (optim.ema_decay), the average replaces the weights, as in evaluations during training. If rank
    0 cannot read the checkpoint, every rank raises CheckpointError.
    """
    sent: dict[str, Any] = {}
    reading = done_in_thread(group, "weights", lambda: compatibility.read_whole(path) if group.rank == 0 else {})
    if group.rank == 0:
        try:
            found = reading.result()
            weights = compatibility.weights_in(found, path, average=True)
            # Ignore `config` and `step` unless this trainer wrote the file. In another program's
            # file, they may have a different meaning.
            known = found if "sampler" in found else {}
            sent = {"model": weights, "config": known.get("config", {}), "step": known.get("step")}
        except CheckpointError as error:
            sent = {"problem": str(error).removeprefix("checkpoint.load: ")}
    buffer = io.BytesIO()
    torch.save(sent, buffer)
    got: dict[str, Any] = torch.load(
        io.BytesIO(group.broadcast_bytes(buffer.getvalue(), 0)), map_location="cpu", weights_only=True
    )
    if "problem" in got:
        raise CheckpointError(got["problem"])
    return got


def _evaluate(
    settings: config.Config,
    data: DataSet,
    weights: Mapping[str, torch.Tensor],
    path: Path,
    device: torch.device,
    group: Group,
) -> Evaluation:
    model = build_model(settings.model, data.shape, data.classes, settings.data.seed)
    if wrong := compatibility.list_differences(weights, model.state_dict()):
        raise CheckpointError(
            f"{path} was made with a different model: {'; '.join(wrong[:3])}. Set model.* and data.* "
            "to the values used in training"
        )
    model.load_state_dict(dict(weights))
    network: nn.Module = model.to(device).eval()
    # This StopRequest does not listen for signals, so SIGTERM ends the process at once.
    own, stop = DataShare(group.rank, group.world), StopRequest(group)
    criterion = Loss(settings.optim)
    criterion.check(settings.data, data.targets, data.classes)
    inner = open_accumulator(
        data.targets, data.classes, criterion.each, settings.eval, decisions=criterion.of_decisions
    )
    adding = Callbacks(settings.train.callbacks).summing(inner)
    side, key = settings.data.size_tested, settings.data.size_key
    shape, key = ((3, side, side), "data.test_image_size") if side else (data.shape, key)
    with explain_image_size(settings.model, shape, data.classes, key):
        scores = over_views(network, settings.eval.tta, data.shape)
        result = evaluate(scores, own, data, settings.train.eval_batch, group, stop, adding=adding)
    assert result is not None
    check_test_images(result.unreadable, data.test_size, settings.data)
    return result


def _folder(options: argparse.Namespace) -> Path:
    path: Path = options.checkpoint
    return options.output or (path if path.is_dir() and path.suffix != ".dcp" else path.parent) / FOLDER


def _publish(result: Evaluation, files: EvaluationFiles, path: Path, step: int | None) -> None:
    name = path.stem if step is None else f"step-{step:09d}"
    try:
        target = files.write(name, result, step=step, checkpoint=str(path))
    except OSError as error:
        remedy = "set --output to a different folder"
        raise CheckpointError(f"{error.filename or name} cannot be written ({error.strerror}): {remedy}") from error
    lost = f", {result.unreadable} unreadable" if result.unreadable else ""
    print(f"{path}: {result.samples} test samples{lost}")
    for key, value in result.scalars().items():
        print(f"  {key:9} {value:.6f}")
    files.wait()
    drawn = any(target.parent.glob(f"{target.stem}-*.png"))
    print(f"wrote {target}" + (" and plots" if drawn else ""), flush=True)

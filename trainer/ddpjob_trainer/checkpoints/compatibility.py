"""Checks whether a checkpoint fits a model, lists the tensors that differ, and suggests keys to
set.
"""

from __future__ import annotations

import fnmatch
import importlib
import io
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ddpjob_trainer.checkpoints import best, dcp, torch_file
from ddpjob_trainer.distributed.process_group import Group, done_in_thread
from ddpjob_trainer.errors import CheckpointError, first_line

Tensors = Mapping[str, torch.Tensor]
_SHOWN = 3
_SHAPING = ("model.", "data.name", "data.shape", "data.classes", "optim.name", "amp.")
"""Prefixes of the configuration keys that determine which tensors a checkpoint contains."""
_WHERE = ("model", "state_dict", "model_state_dict")
"""Keys under which a torch.save file may hold the state dict: those of this trainer, torchvision,
timm and PyTorch's examples.
"""
_AVERAGES = ("state_dict_ema", "model_ema")
"""Keys of the weights' moving average in files from timm and from torchvision's reference scripts.
"""
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Components that torch.compile and other module wrappers insert into tensor names."""


def list_differences(saved: Tensors, wanted: Tensors) -> list[str]:
    """Return descriptions of the differences between a checkpoint's and a model's tensors.

    The differences are in the model's order. An empty list means that the tensors fit.
    """
    found = []
    for name, tensor in wanted.items():
        if name not in saved:
            found.append(f"{name} {_shape(tensor)} is not in the checkpoint")
        elif saved[name].shape != tensor.shape:
            found.append(f"{name} is {_shape(saved[name])} in the checkpoint and {_shape(tensor)} in the model")
    return found + [
        f"{name} {_shape(tensor)} is not in the model" for name, tensor in saved.items() if name not in wanted
    ]


def check_resume(snapshot: Mapping[str, Any], wanted: Tensors, settings: Mapping[str, Any], folder: Path) -> None:
    """Raise CheckpointError if training with `settings` cannot resume from `snapshot`.

    `wanted` contains the tensors of the current model.
    """
    if missing := {"step", "model", "optimizer", "config"} - snapshot.keys():
        raise CheckpointError(
            f"the newest checkpoint in {folder} has no {min(missing)}, because your own training loop saved it; "
            "resume with that loop, or set checkpoint.dir to a different folder"
        )
    for key, before in (("data.seed", settings["data.seed"]), ("data.repeats", 1)):
        now = settings[key]
        if (was := snapshot["config"].get(key, before)) != now:
            raise CheckpointError(
                f"the checkpoint of step {snapshot['step']} in {folder} was made with {key}={was}, but {key} is "
                f"now {now}. This key determines the order of the samples, which must not change. To resume, set "
                f"{key}={was}; to start from scratch, set checkpoint.dir to a different folder"
            )
    changed = changed_keys(snapshot["config"], settings)
    found = list_differences(snapshot["model"], wanted)
    if not found and snapshot["config"]["optim.name"] != settings["optim.name"]:
        found = [f"the optimizer was {snapshot['config']['optim.name']}, but is now {settings['optim.name']}"]
    if not found:
        return
    remedy = f"use the original settings {' '.join(changed)}" if changed else "use the original configuration"
    raise CheckpointError(
        f"the checkpoint of step {snapshot['step']} in {folder} was made with a different model: "
        f"{summarize(found)}. To resume, {remedy}; to start from scratch, set checkpoint.dir to a "
        "different folder"
    )


def changed_keys(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the settings that have changed since a checkpoint was saved and that determine its
    tensors.

    Each setting has the form `key=value`, with the value that was used for the checkpoint.
    """
    # Every data set except synthetic ignores data.shape and data.classes.
    fixed = () if was.get("data.name") == "synthetic" else ("data.shape", "data.classes")
    shaping = (key for key in was if key.startswith(_SHAPING) and key not in fixed)
    return [f"{key}={_written(was[key])}" for key in shaping if key in now and was[key] != now[key]]


def describe_changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the settings that have changed since a checkpoint, as `optim.lr 0.1 -> 0.05, ...`."""
    changed = (key for key in now if key in was and was[key] != now[key])
    return ", ".join(f"{key} {_written(was[key])} -> {_written(now[key])}" for key in changed)


def load_weights(
    path: Path,
    keep: tuple[str, ...],
    model: Tensors,
    group: Group,
    *,
    average: bool = True,
    alive: Callable[[], None] = lambda: None,
) -> dict[str, torch.Tensor]:
    """Return, on every rank, {name: tensor} for all weights that training starts from.

    The weights come from the checkpoint. With `average`, the checkpoint's moving average is used
    instead, if there is one. A tensor keeps its value in `model` if its name matches a pattern in
    `keep`. Only rank 0 reads the file. If the file has a moving average, rank 0 prints whether the
    average is used. `alive` is called repeatedly while the ranks wait. Raises CheckpointError on
    every rank if the weights cannot be read or do not fit.
    """
    return share_weights(lambda: _take_fitting(path, keep, model, average), model, group, alive)


def share_weights(
    take: Callable[[], dict[str, torch.Tensor]], model: Tensors, group: Group, alive: Callable[[], None]
) -> dict[str, torch.Tensor]:
    """Return, on every rank, {name: tensor} for all weights.

    The weights come from rank 0's result of `take`. Weights that this result lacks come from
    `model`. `alive` is called repeatedly while the ranks wait. If `take` raises CheckpointError on
    rank 0, this error is raised on every rank.
    """
    weights: dict[str, torch.Tensor] = {}
    problem = ""
    reading = done_in_thread(group, "weights", lambda: take() if group.rank == 0 else {}, alive)
    if group.rank == 0:
        try:
            weights = reading.result()
        except CheckpointError as error:
            problem = str(error)
    buffer = io.BytesIO()
    torch.save({"weights": weights, "problem": problem}, buffer)
    sent = torch.load(io.BytesIO(group.broadcast_bytes(buffer.getvalue(), 0)), map_location="cpu", weights_only=True)
    if sent["problem"]:
        raise CheckpointError(sent["problem"])
    return {name: sent["weights"].get(name, tensor) for name, tensor in model.items()}


def _take_fitting(path: Path, keep: tuple[str, ...], model: Tensors, average: bool) -> dict[str, torch.Tensor]:
    content = read_whole(path)
    found = weights_in(content, path, average=average)
    if idle := [pattern for pattern in keep if not fnmatch.filter([*model, *found], pattern)]:
        raise CheckpointError(
            f"checkpoint.load_except: {idle[0]!r} matches no tensor of the model or of {path}; use names such as "
            f"{', '.join([*model][:2])}, ..., {', '.join([*model][-2:])}"
        )
    if has_average(content):
        kind = "the moving average of the weights (used for evaluations during training)" if average else "the weights"
        other = "false to load the weights themselves" if average else "true to load their moving average"
        print(f"checkpoint.load: loaded {kind} from {path} (set checkpoint.load_average={other})", flush=True)
    weights = {
        name: tensor
        for name, tensor in found.items()
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in keep)
    }
    wanted = {
        name: tensor
        for name, tensor in model.items()
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in keep)
    }
    if wrong := list_differences(weights, wanted):
        names = ",".join(dict.fromkeys(text.split()[0] for text in wrong))
        raise CheckpointError(
            f"checkpoint.load: the weights in {path} do not fit the model: {summarize(wrong)}. Set "
            "model.* to the values used in that training, or set "
            f"checkpoint.load_except={names[:200]} to keep the initial values of these tensors"
        )
    check_finite("checkpoint.load", path, weights)
    return weights


def check_finite(key: str, path: Path | str, weights: Tensors) -> None:
    """Raise CheckpointError if a tensor contains NaN."""
    if broken := [name for name, tensor in weights.items() if tensor.isnan().any()]:
        raise CheckpointError(
            f"{key}: {len(broken)} of the {len(weights)} tensors in {path} contain NaN (the first is"
            f" {broken[0]}), because that training diverged. Use an earlier checkpoint"
        )


def read_whole(path: Path, key: str = "checkpoint.load") -> Any:
    """Return the entire contents of a file or folder that holds a model's weights.

    `path` may be one of this trainer's checkpoints: a file, a dcp folder, or a checkpoint folder.
    In a checkpoint folder, the best checkpoint is read or, if none is marked, the newest one.
    `path` may also be a safetensors file, or a torch.save file with a state dict at the top level
    or under a key in `_WHERE`. Raises CheckpointError with a message that names `key`.
    """
    try:
        path = _choose_checkpoint(path)
        return _read(path)
    except CheckpointError as error:
        raise CheckpointError(f"{key}: {path} is {error}; choose a different checkpoint") from error
    except OSError as error:
        raise CheckpointError(f"{key}: {path} cannot be read ({error.strerror}); choose a readable file") from error
    except Exception as error:  # torch's reader fails in many ways on arbitrary files.
        if found := re.search(r"[Uu]nsupported (?:global: )?GLOBAL (\S+)", str(error)):
            raise CheckpointError(
                f"{key}: {path} contains a {found[1]}, which would run code when loaded; use a file"
                " that contains only the state dict, written by "
                f"torch.save(model.state_dict(), FILE)"
            ) from error
        # For a pickle, torch's message advises weights_only=False. That does not help users who do
        # not call torch.load themselves, so the message is left out.
        why = "" if isinstance(error, pickle.UnpicklingError) else f": {first_line(error)}"
        raise CheckpointError(f"{key}: {path} is damaged, or was not written by torch.save{why}") from error


def has_average(found: Any) -> bool:
    """Return whether `found`, the content of a file, has a moving average of the weights."""
    if not isinstance(found, dict):
        return False
    own = found.get("average")
    return bool(own.get("updates")) if isinstance(own, dict) else any(key in found for key in _AVERAGES)


def weights_in(found: Any, path: Path, *, average: bool, key: str = "checkpoint.load") -> dict[str, torch.Tensor]:
    """Return the model's tensors by name. `found` is the content of the file `path`.

    With `average`, return the moving average of the weights instead, if the file has one. Names are
    those of the model without any wrapper, as in this trainer's checkpoints. In other files,
    DistributedDataParallel (`module.`) and torch.compile (`_orig_mod.`) may have added components
    to the names. This function removes these components. Raises CheckpointError.
    """
    ours = isinstance(found, dict) and "sampler" in found and "model" in found
    averages: dict[str, torch.Tensor] = {}
    wanted: tuple[str, ...] = _WHERE
    if average and has_average(found):
        if isinstance(found.get("average"), dict):
            averages = found["average"]["averages"]
        else:
            wanted = (*_AVERAGES, *_WHERE)
    for place in wanted:
        if isinstance(found, dict) and isinstance(found.get(place), dict):
            found = found[place]
            break
    # torch's AveragedModel stores the number of its updates, `n_averaged`, among its tensors.
    if isinstance(found, dict):
        found = {name: value for name, value in found.items() if name != "n_averaged"}
    if (
        not isinstance(found, dict)
        or not found
        or not all(isinstance(tensor, torch.Tensor) for tensor in found.values())
    ):
        raise CheckpointError(
            f"{key}: {path} does not contain a state dict (a mapping from names to tensors), neither"
            " at the top level nor under"
            f" {', '.join(_WHERE)}"
        )
    tensors = {**found, **averages}
    return tensors if ours else {_plain_name(str(name)): tensor for name, tensor in tensors.items()}


def _plain_name(name: str) -> str:
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":
        del parts[0]
    return ".".join(parts)


def _choose_checkpoint(path: Path) -> Path:
    """Return the best or newest checkpoint in a checkpoint folder, or any other path unchanged."""
    if not path.is_dir() or path.resolve().suffix == dcp.SUFFIX:
        return path
    if (marked := best.find_marked(path)) is not None and not marked.exists():
        raise CheckpointError(f"a folder whose best.json names {marked.name}, which has been deleted")
    inside = marked or max([*path.glob("step-*.pt"), *path.glob("step-*.dcp")], default=None)
    if inside is None:
        raise CheckpointError("a folder without a checkpoint")
    return inside


def _read(path: Path) -> Any:
    if path.is_dir():
        dcp.check(path)
        return dcp.read(path)
    if path.suffix == ".safetensors":
        return importlib.import_module("safetensors.torch").load_file(path)
    with torch_file.open_regular(path) as file:
        content = file.readall()
    if torch_file.is_ours(content):
        torch_file.check(content)
    return torch_file.decode(content)


def summarize(found: list[str]) -> str:
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return "; ".join(found[:_SHOWN]) + more


def _shape(tensor: torch.Tensor) -> str:
    return str(tuple(tensor.shape))


def _written(value: Any) -> str:
    if value is None or value == "":
        return "(none)"
    return (
        str(value).lower()
        if isinstance(value, bool)
        else ",".join(map(str, value))
        if isinstance(value, list)
        else str(value)
    )

"""Does a checkpoint fit the model that is to take it? If not: which tensors differ, and which keys to set."""

from __future__ import annotations

import fnmatch
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ddpjob_trainer.checkpoints import best, parts, torch_file
from ddpjob_trainer.errors import CheckpointError
from ddpjob_trainer.group import Group

Tensors = Mapping[str, torch.Tensor]
_SHOWN = 3
_SHAPING = ("model.", "data.name", "data.shape", "data.classes", "optim.name", "amp.", "ema.")
"""Keys that decide which tensors there are."""


def differences(saved: Tensors, wanted: Tensors) -> list[str]:
    """What keeps the tensors of a checkpoint from being those of a model, in words; the model's order."""
    found = []
    for name, tensor in wanted.items():
        if name not in saved:
            found.append(f"{name} {_shape(tensor)} is not in the checkpoint")
        elif saved[name].shape != tensor.shape:
            found.append(f"{name} is {_shape(saved[name])} in the checkpoint and {_shape(tensor)} in the model")
    return found + [f"{name} {_shape(tensor)} is not in the model" for name, tensor in saved.items() if name not in wanted]


def check_resume(snapshot: Mapping[str, Any], wanted: Tensors, settings: Mapping[str, Any], folder: Path) -> None:
    """Raises CheckpointError when a training with these settings and tensors cannot go on from a snapshot."""
    changed = changed_keys(snapshot["config"], settings)
    found = differences(snapshot["model"], wanted)
    if not found and snapshot["config"]["optim.name"] != settings["optim.name"]:
        found = [f"its optimizer is {snapshot['config']['optim.name']}, and now it is {settings['optim.name']}"]
    if not found:
        return
    remedy = f"set {' '.join(changed)} as it was made with" if changed else "give the configuration that it was made with"
    raise CheckpointError(
        f"the checkpoint of step {snapshot['step']} in {folder} is of another model: {_summary(found)}."
        f" To go on from it {remedy}; to train anew set checkpoint.dir to another folder"
    )


def changed_keys(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`key=value` of the checkpoint, for keys that decide which tensors there are and that have another value now."""
    shaping = (key for key in was if key.startswith(_SHAPING))
    return [f"{key}={_written(was[key])}" for key in shaping if key in now and was[key] != now[key]]


def load_weights(path: Path, keep: tuple[str, ...], model: Tensors, group: Group) -> dict[str, torch.Tensor]:
    """The weights to start from, by name, complete, on every rank: the checkpoint's, and the model's own for the names `keep` matches.

    Rank 0 reads. Raises CheckpointError on every rank when they cannot be read or do not fit.
    """
    weights: dict[str, torch.Tensor] = {}
    problem = ""
    if group.rank == 0:
        try:
            weights = _fitting(path, keep, model)
        except CheckpointError as error:
            problem = str(error)
    buffer = io.BytesIO()
    torch.save({"weights": weights, "problem": problem}, buffer)
    sent = torch.load(io.BytesIO(group.broadcast_bytes(buffer.getvalue(), 0)), map_location="cpu", weights_only=True)
    if sent["problem"]:
        raise CheckpointError(sent["problem"])
    return {name: sent["weights"].get(name, tensor) for name, tensor in model.items()}


def _fitting(path: Path, keep: tuple[str, ...], model: Tensors) -> dict[str, torch.Tensor]:
    found = read_weights(path)
    weights = {name: tensor for name, tensor in found.items() if not any(fnmatch.fnmatchcase(name, pattern) for pattern in keep)}
    wanted = {name: tensor for name, tensor in model.items() if not any(fnmatch.fnmatchcase(name, pattern) for pattern in keep)}
    if wrong := differences(weights, wanted):
        names = ",".join(dict.fromkeys(text.split()[0] for text in wrong))
        raise CheckpointError(
            f"checkpoint.load: the weights in {path} do not fit the model: {_summary(wrong)}."
            f" Set model.* as they were trained with, or let these keep their initial values: checkpoint.load_except={names[:200]}"
        )
    return weights


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """A model's tensors by name, from a checkpoint of this trainer (a file, a folder of parts, or the folder of all, whose best or newest
    counts), or from a file of torch.save that holds a state dict, at the top or under model or state_dict. Raises CheckpointError."""
    return weights_in(read_whole(path), path)


def read_whole(path: Path) -> Any:
    """All that is in what `read_weights` takes. Raises CheckpointError."""
    try:
        return _read(path)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint.load: {path} is {error}") from error
    except OSError as error:
        raise CheckpointError(f"checkpoint.load: {path} cannot be read: {error.strerror}; give an existing file") from error
    except Exception as error:  # torch's reader fails in many ways on what it has not written
        raise CheckpointError(
            f"checkpoint.load: {path} is no file of torch.save, or a damaged one: {str(error).partition(chr(10))[0]}"
        ) from error


def weights_in(found: Any, path: Path) -> dict[str, torch.Tensor]:
    """The model's tensors by name of what `path` holds. Raises CheckpointError."""
    for key in ("model", "state_dict", "model_state_dict"):
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
            break
    if not isinstance(found, dict) or not found or not all(isinstance(tensor, torch.Tensor) for tensor in found.values()):
        raise CheckpointError(
            f"checkpoint.load: {path} holds no state dict (names to tensors), neither at the top nor under model or state_dict"
        )
    return {str(name).removeprefix("module."): tensor for name, tensor in found.items()}


def _read(path: Path) -> Any:
    if not path.is_dir():
        content = path.read_bytes()
        if torch_file.is_ours(content):
            torch_file.check(content)
        return torch_file.decode(content)
    if path.resolve().suffix == parts.SUFFIX:
        parts.check(path)
        return parts.read(path)
    inside = best.pointed_to(path) or max([*path.glob("step-*.pt"), *path.glob("step-*.dcp")], default=None)
    if inside is None:
        raise CheckpointError("a folder without a checkpoint; give a file, or a folder that a training has saved to")
    return _read(inside)


def _summary(found: list[str]) -> str:
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return "; ".join(found[:_SHOWN]) + more


def _shape(tensor: torch.Tensor) -> str:
    return str(tuple(tensor.shape))


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else ",".join(map(str, value)) if isinstance(value, list) else str(value)

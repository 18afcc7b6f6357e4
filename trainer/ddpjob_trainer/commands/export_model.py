"""`python -m ddpjob_trainer export CHECKPOINT -o FOLDER` writes the model for other programs.

`model.safetensors` contains the weights in Hugging Face's format. `model.pt2` is a program from
torch.export. It runs on batches of any size, and does not need the model's source code. Both files
also describe the data, because other programs must prepare their inputs in the same way. In
`model.pt2`, the description is the file `metadata.json`. In `model.safetensors`, it is in the
header's `__metadata__`, whose values must be strings.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddpjob_trainer import config
from ddpjob_trainer.atomic_files import replacing, write_all
from ddpjob_trainer.checkpoints import compatibility
from ddpjob_trainer.checkpoints.index import prepare_folder
from ddpjob_trainer.errors import CheckpointError, TrainingError, first_line
from ddpjob_trainer.model.models import build_model

WEIGHTS, PROGRAM, METADATA = "model.safetensors", "model.pt2", "metadata.json"
"""Names of the two exported files, and of the metadata file inside `model.pt2`."""
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def main(arguments: list[str]) -> int:
    """Run the command, and return the exit code. Raises TrainerError."""
    parser = argparse.ArgumentParser(
        prog="python -m ddpjob_trainer export",
        description="Export a checkpoint's model for other programs: write its weights as safetensors, and a "
        "program made by torch.export. If there is a moving average of the weights, it is exported "
        "instead.",
    )
    parser.add_argument(
        "checkpoint",
        type=Path,
        help="a checkpoint (file or folder), or a folder of checkpoints, for the best or newest of them",
    )
    parser.add_argument("-o", "--output", type=Path, required=True, help=f"folder for {WEIGHTS} and {PROGRAM}")
    options = parser.parse_args(arguments)
    prepare_folder(options.output, "--output")
    model, known = _read(options.checkpoint)
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in known.items()}
    save_safetensors(model.state_dict(), texts, options.output / WEIGHTS)
    print(f"wrote {options.output / WEIGHTS}", flush=True)
    example = torch.zeros(2, *known["size"], dtype=getattr(torch, known["dtype"]))
    _save_program(model, example, known, options.output / PROGRAM)
    print(f"wrote {options.output / PROGRAM}")
    print("\n".join(f"  {name}: {text}" for name, text in texts.items()))
    return 0


def _read(path: Path) -> tuple[nn.Module, dict[str, Any]]:
    """Return the checkpoint's model and metadata.

    The model is on the CPU, in evaluation mode. Raises CheckpointError.
    """
    try:
        content = compatibility.read_whole(path)
        weights = compatibility.weights_in(content, path, average=True)
    except CheckpointError as error:
        raise CheckpointError(str(error).removeprefix("checkpoint.load: ")) from error
    if not {"config", "sampler", "data"} <= content.keys():
        raise CheckpointError(
            f"{path} does not contain a configuration of this trainer; export a checkpoint that this trainer has "
            "written"
        )
    own = {key: value for key, value in content["config"].items() if key.startswith(("data.", "model."))}
    settings = config.load(None, [], base=own)
    data = content["data"]
    # Turn off settings that affect only training. They would make the exported program longer.
    plain = replace(settings.model, compile=False, sync_batchnorm=False, channels_last=False, drop_path=0.0, freeze=())
    model = build_model(plain, tuple(data["shape"]), data["classes"], settings.data.seed)
    if wrong := compatibility.list_differences(weights, model.state_dict()):
        raise CheckpointError(
            f"{path} does not fit model.name={plain.name}, whose code has changed since training:"
            f" {'; '.join(wrong[:3])}; restore the code that the checkpoint was trained with"
        )
    model.load_state_dict(weights)
    side = settings.data.size_tested
    return model.eval(), {
        "model": plain.name,
        "step": content["step"],
        "torch": str(torch.__version__),
        "classes": data["names"] or data["classes"],
        "size": [data["shape"][0], side, side] if side else data["shape"],
        "dtype": "int64" if data["whole_numbers"] else "float32",
        **{key: data[key] for key in ("scale", "mean", "std") if key in data},
    }


def save_safetensors(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], path: Path) -> None:
    """Write tensors to a safetensors file (https://huggingface.co/docs/safetensors).

    The file has a JSON header, followed by the bytes of the tensors. Tensors with the largest
    elements come first, which aligns all tensors. Raises TrainingError for a dtype that few readers
    support.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in _TYPES:
            raise TrainingError(
                f"{path} was not written: {name} has the unsupported type {tensor.dtype}; use one of"
                f" {', '.join(_TYPES.values())}, or a buffer with persistent=False"
            )
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name in order:
        begin, end = end, end + tensors[name].nbytes
        shape = list(tensors[name].shape)
        header[name] = {"dtype": _TYPES[tensors[name].dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as file:
        write_all(file, len(text).to_bytes(8, "little") + text)
        for name in order:
            write_all(file, tensors[name].detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())


def _save_program(model: nn.Module, example: torch.Tensor, metadata: Mapping[str, Any], path: Path) -> None:
    try:
        batch = ({0: torch.export.Dim("batch")},)
        program = torch.export.export(model, (example,), dynamic_shapes=batch, strict=False)
        torch.export.save(program, path, extra_files={METADATA: json.dumps(metadata)})
    except Exception as error:  # Tracing a user's model can raise any exception.
        raise TrainingError(
            f"{path} was not written: torch.export cannot trace model.name={metadata['model']}"
            f" ({first_line(error)}); use {WEIGHTS} and the model's own code instead"
        ) from error

"""Runs a script that is written for GPUs on a machine without GPUs: on_cpu.py SCRIPT [ARGUMENT
...].

The CPU replaces each process's GPU, and gloo replaces NCCL. The script's own lines run unchanged.
Optimizer step HELD of a process waits for the file DDPJOB_CHECKPOINT_DIR/go, and creates the file
held-RANK while it waits. Two packages that may be missing are replaced by stand-ins: boto3, which
is only imported, and the functions of hydra that the script uses.
"""

import importlib.util
import os
import runpy
import sys
import time
import types
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def placed(value: Any) -> Any:
    """Return the CPU instead of a GPU, which may be given by its number."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return CPU if is_number or str(value).startswith("cuda") else value


class OnCpu(TorchFunctionMode):
    """Keeps tensors on the CPU."""

    def __torch_function__(self, func: Any, _: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = placed(kwargs["device"])
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = (args[0], *map(placed, args[1:]))
        return func(*args, **kwargs)


def replace(holder: Any, name: str, **changed: Any) -> None:
    """Replace a function or constructor with one that uses different values for some keywords."""
    whole = getattr(holder, name)
    setattr(holder, name, lambda *args, **more: whole(*args, **{**more, **changed}))


def play_gpus() -> None:
    """Replace the GPU functions of torch that the examples call."""
    for name, answer in {"is_available": True, "device_count": 2, "set_device_index": None}.items():
        setattr(torch.accelerator, name, lambda *_, answer=answer: answer)
    # torch's optimizers require a usable generator
    torch.accelerator.current_accelerator = lambda check_available=False: None if check_available else GPU
    torch.cuda.set_device = lambda *_: None  # type: ignore[assignment]
    torch.nn.Module.to = torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign, assignment]
    replace(torch.distributed, "init_process_group", backend="gloo")
    replace(torch.nn.parallel.DistributedDataParallel, "__init__", device_ids=None)
    replace(torch.utils.data.DataLoader, "__init__", pin_memory=False)
    replace(torch, "load", map_location="cpu")


def main_of_hydra(config_path: str, config_name: str, **_: Any) -> Any:
    """Return a replacement for hydra.main that reads a file with groups of values, and arguments of
    the form GROUP.KEY=VALUE.
    """

    def decorate(function: Any) -> Any:
        def called() -> None:
            config = yaml.safe_load((Path(sys.argv[0]).parent / config_path / f"{config_name}.yaml").read_text())
            for argument in sys.argv[1:]:
                key, _, value = argument.partition("=")
                group, _, key = key.partition(".")
                config[group][key] = yaml.safe_load(value)
            function(config)

        return called

    return decorate


def stand_in(name: str, **contents: Any) -> None:
    """Create a module with this name if it is not installed."""
    if importlib.util.find_spec(name) is None:
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(contents)


steps = 0


def hold(*_: Any) -> None:
    """Hold the process after a step."""
    global steps
    steps += 1
    folder = Path(os.environ["DDPJOB_CHECKPOINT_DIR"])
    if steps == int(os.environ["HELD"]) and not (folder / "go").exists():
        (folder / f"held-{os.environ['RANK']}").touch()
        until = time.monotonic() + 600
        while not (folder / "go").exists():
            assert time.monotonic() < until
            time.sleep(0.02)


stand_in("hydra", main=main_of_hydra)
stand_in("omegaconf", DictConfig=dict)
stand_in("boto3")
play_gpus()
register_optimizer_step_post_hook(hold)
del sys.argv[0]
sys.path[0] = str(Path(sys.argv[0]).parent)
with OnCpu():
    runpy.run_path(sys.argv[0], run_name="__main__")

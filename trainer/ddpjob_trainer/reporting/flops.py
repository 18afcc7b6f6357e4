"""The share of a device's peak performance that training uses.

This share is called MFU, model FLOPs utilization (Chowdhery et al., PaLM, 2022).
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial

import torch

from ddpjob_trainer.atomic_files import write_atomically
from ddpjob_trainer.config.config import Config
from ddpjob_trainer.model.models import build_model, is_own

_PEAKS: tuple[tuple[str, float, float, float], ...] = (
    # Each row contains a pattern for a device's name, and the device's peak in 10^12 FLOP/s in
    # 16-bit formats, TensorFloat-32 and float32. The peaks are from NVIDIA's data sheets, without
    # sparsity.
    (r"H100 PCIe", 756, 378, 51),
    (r"H100 NVL", 835, 417, 60),
    (r"H(200|100|800)\b", 989, 494, 67),
    (r"A(100|800)\b", 312, 156, 19.5),
    (r"A40\b", 149.7, 74.8, 37.4),
    (r"A30\b", 165, 82, 10.3),
    (r"A10G\b", 70, 35, 35),
    (r"A10\b", 125, 62.5, 31.2),
    (r"L40S\b", 362, 183, 91.6),
    (r"L4\b", 121, 60, 30.3),
    (r"V100\b", 125, 15.7, 15.7),
    (r"\bT4\b", 65, 8.1, 8.1),
)


def peak(name: str, dtype: torch.dtype, *, tf32: bool) -> float:
    """Return the peak FLOP/s of a GPU that computes in `dtype`, or 0 if the peak is unknown.

    `name` is the result of torch.cuda.get_device_name.
    """
    if re.search(r"\bMIG\b", name):  # A MIG device is only a part of the GPU, and its peak is not in the table.
        return 0.0
    for pattern, short, fast, whole in _PEAKS:
        if re.search(pattern, name):
            return 1e12 * (short if dtype is not torch.float32 else fast if tf32 else whole)
    return 0.0


def device_peak(config: Config, device: torch.device, dtype: torch.dtype) -> float:
    """Return the peak FLOP/s of a device, or 0 if the peak is unknown.

    The peak is the value of report.peak_flops. If this key is not set, the device's name determines
    the peak.
    """
    if config.report.peak_flops or device.type != "cuda":
        return config.report.peak_flops
    return peak(torch.cuda.get_device_name(device), dtype, tf32=config.amp.tf32)


def flops_of_run(config: Config, shape: tuple[int, ...], classes: int, *, whole_numbers: bool = False) -> float:
    """Return the result of `flops_per_sample`, and cache it in RUN/flops.json.

    Counting takes most of a second. Without the cache, every restart would wait for it. For a
    user's own model, the count is not cached, because the model's code may change before the next
    run. Only rank 0 calls this, because rank 0 does the reporting.
    """
    count = partial(flops_per_sample, config, shape, classes, whole_numbers=whole_numbers)
    if is_own(config.model):
        return count()
    path = config.run_dir / "flops.json"
    of = json.dumps([asdict(config.model), list(shape), classes, whole_numbers, torch.__version__], default=str)
    with suppress(OSError, ValueError, TypeError, KeyError):
        kept = json.loads(path.read_bytes())
        if kept["of"] == of:
            return float(kept["flops"])
    found = count()
    with suppress(OSError):  # If the cache cannot be written, the next run counts the FLOPs again.
        write_atomically(path, json.dumps({"of": of, "flops": found}).encode())
    return found


def flops_per_sample(config: Config, shape: tuple[int, ...], classes: int, *, whole_numbers: bool = False) -> float:
    """Return the FLOPs of a forward and backward pass for one sample, or 0 if they are unknown.

    torch's counter counts a multiplication and an addition as two operations. Nothing is computed,
    because the model is created without values. If a user's own model needs values, the result is
    0.

    Must be called before the ranks have joined. Until then, a model that communicates with its
    peers gets an error, and the result is 0. Later, such a model would wait for ranks that do not
    call this function.
    """
    from torch.utils.flop_counter import FlopCounterMode

    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                keys = replace(config.model, sync_batchnorm=False, compile=False)
                model = build_model(keys, shape, classes, 0, torch.device("meta")).train()
                images = torch.empty(2, *shape, dtype=torch.int64 if whole_numbers else None)
            with FlopCounterMode(display=False) as counter:
                torch.autograd.backward(model(images).sum())
        except Exception:  # A user's own model may raise anything.
            return 0.0
    return float(counter.get_total_flops()) / len(images)

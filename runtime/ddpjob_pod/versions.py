"""Finds the versions of the packages that this process uses, and the model of its GPU.

This module inspects only modules that the program has already imported. It therefore imports
nothing, and does not read the list of installed packages, which may have hundreds of entries. The
model of the GPU is reported only once the program uses the GPU, because an earlier query would
initialize CUDA in a process that may fork.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

PACKAGES = (
    *("torch", "numpy", "torchvision", "lightning", "pytorch_lightning", "transformers", "accelerate"),
    *("deepspeed", "timm", "datasets", "peft", "torchaudio", "xformers", "flash_attn", "triton", "PIL"),
)
_MODULES = {"PIL": "pillow"}


def read_environment() -> dict[str, Any]:
    """Return {"packages": {name: version}}, with Python and CUDA among the names.

    If the program uses a GPU, the result also has the GPU's model under "gpu".
    """
    packages = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in PACKAGES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            packages[_MODULES.get(name, name)] = version[:80]
    found: dict[str, Any] = {"packages": packages}
    torch: Any = sys.modules.get("torch")
    # An error means that torch was built without CUDA, or that a different module is called torch.
    with contextlib.suppress(Exception):
        cuda = torch.version.cuda
        if isinstance(cuda, str):
            packages["cuda"] = cuda[:80]
        if torch.cuda.is_initialized():
            found["gpu"] = str(torch.cuda.get_device_name())[:80]
    return found

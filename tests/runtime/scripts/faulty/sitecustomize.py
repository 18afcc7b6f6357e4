"""Simulates a defective node. FAULT selects the fault, which occurs only in preflight checks on the
pods or nodes of FAULTY.
"""

import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path

WORDS = Path("/proc/self/cmdline").read_bytes().decode(errors="replace").split("\0")


def _spoil(torch):
    import torch.distributed as dist

    fault = os.environ["FAULT"]
    if fault == "product":
        exact = torch.mm
        torch.mm = lambda a, b: exact(a, b) + (exact(a, b) == exact(a, b).max())
    all_reduce = dist.all_reduce

    def spoilt(numbers, *args, **kwargs):
        if fault == "hang":
            os.kill(os.getpid(), 19)
        result = all_reduce(numbers, *args, **kwargs)
        if fault == "sum":
            numbers[0] += 1
        return result

    dist.all_reduce = spoilt


class _AfterTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            _spoil(module)

        spec.loader.exec_module = exec_module
        return spec


FAULTY = os.environ.get("FAULTY", "").split(",")
if "check" in WORDS and not {os.environ.get("DDPJOB_POD"), os.environ.get("NODE_NAME")}.isdisjoint(FAULTY):
    sys.meta_path.insert(0, _AfterTorch())

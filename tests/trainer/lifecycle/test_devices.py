"""Settings that apply only to CUDA, tested without a CUDA device."""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ddpjob_trainer.distributed import devices, init_method
from ddpjob_trainer.distributed.devices import RankPlacement
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import DeviceError


@pytest.mark.parametrize(
    ("device", "one_device", "expected"),
    [("cuda:1", True, {"device_id": torch.device("cuda:1")}), ("cuda:1", False, {}), ("cpu", True, {})],
)
def test_the_process_group_is_bound_to_the_ranks_only_device(
    device: str, one_device: bool, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(init_method, "open_store", lambda *_: None)
    monkeypatch.setattr(init_method.dist, "init_process_group", lambda *_, **more: given.update(more))
    monkeypatch.setattr(init_method.dist, "destroy_process_group", lambda: None)
    placement = RankPlacement(torch.device(device), "cpu:gloo,cuda:nccl")
    with init_method.join_group(Group(1, 2), placement, 60, one_device=one_device):
        pass
    assert {key: value for key, value in given.items() if key == "device_id"} == expected


def test_cudnn_searches_for_fast_algorithms_unless_results_must_be_reproducible() -> None:
    before = torch.backends.cudnn.benchmark
    try:
        for device, repeatable, expected in (("cuda", False, True), ("cuda", True, False), ("cpu", False, False)):
            torch.backends.cudnn.benchmark = False
            devices.search_algorithms(torch.device(device), repeatable=repeatable)
            assert torch.backends.cudnn.benchmark == expected
    finally:
        torch.backends.cudnn.benchmark = before


@pytest.mark.parametrize(
    ("gpus", "visible", "built", "fails"),
    [
        ("8 nvidia.com/gpu", None, True, True),
        ("1 nvidia.com/mig-1g.10gb", None, True, True),
        ("8 nvidia.com/gpu", "", True, False),
        ("8 nvidia.com/gpu", None, False, False),
        ("0 nvidia.com/gpu", None, True, False),
        ("8 example.com/gpu", None, True, False),
        ("", None, True, False),
    ],
)
def test_a_node_whose_gpus_are_gone_does_not_train_on_the_cpu(
    gpus: str, visible: str | None, built: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other nodes would wait for it in NCCL, and a job of one node would train a hundred times
    slower.
    """
    monkeypatch.setattr(devices, "_count", lambda kind: 0)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    for name, value in (("DDPJOB_GPUS", gpus), ("CUDA_VISIBLE_DEVICES", visible)):
        if value is not None:
            monkeypatch.setenv(name, value)
    if fails:
        with pytest.raises(DeviceError, match=f"this node has {gpus}, but torch does not see any device; check"):
            devices.choose("auto", 0)
    else:
        assert devices.choose("auto", 0).device.type == "cpu"
    assert devices.choose("gloo", 0).device.type == "cpu"


FAULTS = """
import resource

class Callback:
    def on_step(self, step, loss):
        print("faults", resource.getrusage(resource.RUSAGE_SELF).ru_minflt, flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "confstr") or "CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="needs glibc")
@pytest.mark.parametrize(("tuned", "kept"), [({}, True), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False)])
def test_a_step_on_a_cpu_reuses_the_memory_of_the_previous_step(
    tuned: dict[str, str], kept: bool, tmp_path: Path
) -> None:
    """A step that does not reuse it causes at least 10,000 page faults. The heap may still grow in
    single steps.
    """
    (tmp_path / "faults.py").write_text(FAULTS)
    keys = ["data.name=synthetic", "data.size=1024", "data.batch=64", "data.shape=[3,32,32]", "model.name=small_cnn"]
    keys += ["train.epochs=1", "train.log_every=1", "train.eval_every=0", "checkpoint.every_epochs=0"]
    keys += ["train.callbacks=faults:Callback", f"checkpoint.dir={tmp_path / 'run'}"]
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-m", "ddpjob_trainer", *keys]
    environment |= {"PYTHONPATH": paths, **tuned}
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    totals = [int(line.split()[1]) for line in output.splitlines() if line.startswith("faults")]
    pages = [after - before for before, after in itertools.pairwise(totals)]
    assert (statistics.median(pages) < 5000) == kept, f"page faults of each step: {pages}"

"""What is set for CUDA alone, without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ddpjob_trainer.distributed import devices, init_method
from ddpjob_trainer.distributed.devices import Placement
from ddpjob_trainer.distributed.process_group import Group


@pytest.mark.parametrize(
    ("device", "one_device", "expected"),
    [("cuda:1", True, {"device_id": torch.device("cuda:1")}), ("cuda:1", False, {}), ("cpu", True, {})],
)
def test_the_process_group_is_bound_to_the_ranks_one_device(
    device: str, one_device: bool, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(init_method, "open_store", lambda *_: None)
    monkeypatch.setattr(init_method.dist, "init_process_group", lambda *_, **more: given.update(more))
    monkeypatch.setattr(init_method.dist, "destroy_process_group", lambda: None)
    placement = Placement(torch.device(device), "cpu:gloo,cuda:nccl")
    with init_method.joined(Group(1, 2), placement, 60, one_device=one_device):
        pass
    assert {key: value for key, value in given.items() if key == "device_id"} == expected


def test_cudnn_searches_the_fastest_algorithm_unless_runs_must_repeat_to_the_bit() -> None:
    before = torch.backends.cudnn.benchmark
    try:
        for device, repeatable, expected in (("cuda", False, True), ("cuda", True, False), ("cpu", False, False)):
            torch.backends.cudnn.benchmark = False
            devices.search_algorithms(torch.device(device), repeatable=repeatable)
            assert torch.backends.cudnn.benchmark == expected
    finally:
        torch.backends.cudnn.benchmark = before

"""The launcher's checks for a pod: DDPJOB_PREFLIGHT."""

from __future__ import annotations

import json
from typing import Any

from built import environment, node


def settings(**spec: Any) -> Any:
    return json.loads(environment(node(**spec))["DDPJOB_PREFLIGHT"])


def test_a_job_without_a_preflight_has_no_preflight_variable() -> None:
    assert "DDPJOB_PREFLIGHT" not in environment(node())


def test_the_launcher_gets_the_pods_required_devices() -> None:
    assert settings(preflight={}, gpusPerNode=8) == {
        "group": True,
        "seconds": 120,
        "least": 0,
        "gpus": 8,
        "resource": "nvidia.com/gpu",
        "backend": "auto",
        "folder": "/checkpoints",
    }
    asked = settings(preflight={"scope": "Group", "timeoutSeconds": 30, "minMegabytesPerSecond": 5000})
    assert (asked["seconds"], asked["least"]) == (30, 5000)
    assert settings(preflight={"scope": "Node"})["group"] is False


def test_the_preflight_does_not_write_to_a_read_only_folder() -> None:
    volume = {"claimName": "shared", "readOnly": True}
    assert settings(preflight={}, storage={"checkpoints": volume})["folder"] == ""

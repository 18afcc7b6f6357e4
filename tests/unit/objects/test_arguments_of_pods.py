"""The arguments that the operator passes to launcher, coordinator and torchrun, recorded so that a
diff shows any change.

Pods of one generation may be created by several releases of the operator, and they run the runtime
with which the job began. A new pod whose arguments differ from its peers', or are unknown to the
older runtime, would end a running job. So an addition needs a default in every runtime of its
protocol's version, and any other change needs a new version. If a change follows these rules,
`python tests/unit/objects/test_arguments_of_pods.py` writes the lists again.
"""

from __future__ import annotations

import difflib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from ddpjob.api.job_spec import Json
from ddpjob.objects.pods import build_coordinator, build_node

sys.path.insert(0, str(Path(__file__).parent))
from built import PLATFORM, container, job

KEPT = Path(__file__).with_name("arguments_of_pods.yaml")
_STORAGE = {"data": {"claimName": "data"}, "checkpoints": {"claimName": "checkpoints"}}
JOBS: dict[str, Json] = {
    "Standard": {"args": ["--epochs=3"], "torchrunArgs": ["--tee=3"], "storage": _STORAGE, "gpusPerNode": 8},
    "Fast": {"script": None, "module": "my.train", "recovery": {"mode": "Fast", "hangAfterSeconds": 60}},
    "command": {"script": None, "command": ["bash", "-c", "horovodrun"], "env": [{"name": "A", "value": "$(POD_IP)"}]},
    "Master": {"rendezvous": {"placement": "Master", "port": 30000}, "nodes": 4, "elastic": {"minNodes": 2}},
}


def given(name: str) -> Json:
    """Return the command, arguments and environment of each container."""
    made = job(**JOBS[name])
    status = replace(made.status, runtime="runtime", round=3)
    pods = [build_node(made, status, PLATFORM, 0, 2)]
    if name != "Master":
        pods.append(build_coordinator(made, status, PLATFORM))
    found = {}
    for pod in pods:
        for each in pod["spec"]["containers"]:
            found[each["name"]] = _program(container(pod, each["name"]))
    return found


def _program(container: Json) -> Json:
    env = [f"{e['name']}={e['value'] if 'value' in e else json.dumps(e['valueFrom'])}" for e in container["env"]]
    return {"command": container["command"], "args": container.get("args", []), "env": env}


def written(value: Any) -> str:
    return yaml.safe_dump(value, sort_keys=False, width=200)


@pytest.mark.parametrize(
    ("spec", "backend"),
    [
        ({"gpusPerNode": 0}, "gloo"),
        ({"gpusPerNode": 1}, "nccl"),
        ({"gpuResource": "amd.com/gpu"}, "nccl"),
        ({"gpuResource": "huawei.com/Ascend910"}, "hccl"),
        ({"gpuResource": "example.com/npu"}, None),
        ({"gpuResource": "example.com/npu", "backend": "gloo"}, "gloo"),
    ],
)
def test_a_script_gets_a_rendezvous_backend_that_torch_accepts(spec: Json, backend: str | None) -> None:
    made = job(**spec)
    env = container(build_node(made, made.status, PLATFORM, 0, 0), "trainer")["env"]
    assert next((e["value"] for e in env if e["name"] == "DDPJOB_BACKEND"), None) == backend


@pytest.mark.parametrize("name", JOBS)
def test_pods_get_the_same_arguments_as_peers_of_an_earlier_release(name: str) -> None:
    kept = written(yaml.safe_load(KEPT.read_text())[name]).splitlines()
    now = written(given(name)).splitlines()
    assert now == kept, "\n".join(difflib.unified_diff(kept, now, "an earlier release", "this one", lineterm=""))


if __name__ == "__main__":
    KEPT.write_text(written({name: given(name) for name in JOBS}))

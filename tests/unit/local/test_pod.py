"""A pod on one machine: invalid commands, and the end of its grace period."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ddpjob.api.job_status import utc_now
from ddpjob.local.paths import RunFolder
from ddpjob.local.pod import Pod
from ddpjob.local.process_cluster import ProcessCluster


@pytest.mark.parametrize(
    "fields", [{"command": ["true", "a\0b"]}, {"command": ["true"], "env": [{"name": "A", "value": "a\0b"}]}]
)
def test_a_container_whose_words_have_a_nul_character_cannot_start(fields: dict[str, Any], tmp_path: Path) -> None:
    """Regression: `ddpjob run` ended with a traceback."""
    folder = RunFolder(tmp_path)
    folder.log("j-0", "trainer").parent.mkdir(parents=True)
    labels = {"ddpjob.io/role": "node", "ddpjob.io/job-uid": "u"}
    container = {"name": "trainer", **fields}
    manifest = {"metadata": {"name": "j-0", "labels": labels}, "spec": {"containers": [container]}}
    pod = Pod(manifest, folder, {}, tmp_path, utc_now())
    view = pod.views["trainer"]
    assert pod.ended and view.reason == "StartError" and "null byte" in view.message
    assert "null byte" in folder.log("j-0", "trainer").read_text()


def test_the_end_of_the_grace_period_does_not_concern_a_force_deleted_pod() -> None:
    """Regression: SIGKILL was sent to process ids that might belong to other processes."""
    killed: list[str] = []
    pod = SimpleNamespace(name="j-0", ended=False, kill=lambda: killed.append("j-0"))
    cluster: Any = SimpleNamespace(pods={"j-0": pod}, changed=SimpleNamespace(set=lambda: None))
    ProcessCluster._grace_is_over(cluster, pod)  # type: ignore[arg-type]
    assert killed == ["j-0"]
    for pods in ({}, {"j-0": SimpleNamespace(ended=False)}):
        cluster.pods = pods
        ProcessCluster._grace_is_over(cluster, pod)  # type: ignore[arg-type]
    assert killed == ["j-0"]

"""`command` with launchers other than the job's own, and how the status reports their failures.

Accelerate's launcher starts ranks on real pods in tests/cluster/test_launchers.py.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import yaml
from process_harness import SCRIPTS, Json, Machine, Run, manifest

LAUNCHED = str(SCRIPTS / "launched.py")


def job(*command: str, nodes: int = 2, **spec: Any) -> Json:
    return manifest(command=list(command), nodes=nodes, **spec)


def said(run: Run) -> set[str]:
    """Return the lines that the ranks have printed about their group.

    The rank that exits first may interrupt the other rank's last read. The job then restarts and
    prints the same lines again.
    """
    logs = (run.log(pod) for pod in run.pods() if "coordinator" not in pod)
    return {line for log in logs for line in log.splitlines() if line.startswith("rank ")}


def test_torchrun_with_standalone_hosts_its_own_store(machine: Machine) -> None:
    run = machine.run(job("torchrun", "--standalone", "--nproc_per_node=2", LAUNCHED, nodes=1), seconds=120)
    assert run.process.returncode == 0, run.everything()
    assert said(run) == {"rank 0 of 2: 2", "rank 1 of 2: 2"}


@pytest.mark.parametrize(
    "command",
    [[sys.executable, LAUNCHED, "--spawn"], [sys.executable, LAUNCHED, "--rpc"]],
    ids=["mp.spawn with tcp", "torch.distributed.rpc"],
)
def test_launchers_that_need_an_address_find_the_pod_with_index_0(machine: Machine, command: list[str]) -> None:
    run = machine.run(job(*command), seconds=120)
    assert run.process.returncode == 0, run.everything()
    assert said(run) == {"rank 0 of 2: 2", "rank 1 of 2: 2"}


def test_a_failed_rank_under_torchrun_is_counted_although_its_process_stays(machine: Machine) -> None:
    """Rank 0 waits for the failed rank in a collective, and torchrun waits for the failed rank's
    process to exit.

    The script does not use @record, but the status still has its rank and traceback.
    """
    run = machine.run(job("torchrun", LAUNCHED, "--fail", "--stay", recovery={"maxRestarts": 0}), seconds=120)
    assert run.process.returncode == 1, run.everything()
    (restart,) = (r for r in run.status["restarts"]["recent"] if r["counted"])
    assert (restart["reason"], restart["rank"]) == ("WorkerFailed", 1), run.everything()
    first = "rank 1 in pod job-1-0 ended with exit code 1: ValueError: made to fail"
    assert restart["message"].startswith(first) and 'raise ValueError("made to fail")' in restart["message"]


def test_a_job_converted_from_kubeflow_runs(machine: Machine) -> None:
    """The job has the form of Kubeflow Trainer's first example: the script is in the manifest,
    under torchrun --no-python.
    """
    inline = (  # a line is one write, because ranks share the output
        "import os\nos.write(1, f\"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}\\n\".encode())\n"
    )
    trainer: Json = {"numNodes": 1, "numProcPerNode": 2, "args": [inline]}
    trainer["command"] = ["torchrun", "--no-python", sys.executable, "-c"]
    spec = {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer}
    theirs = machine.write({"kind": "TrainJob", "metadata": {"name": "inline"}, "spec": spec}, "theirs.yaml")
    made = machine.command("convert", str(theirs), "--image=a:1")
    assert made.returncode == 0, made.stderr
    run = machine.run(yaml.safe_load(made.stdout))
    assert run.process.returncode == 0, run.everything()
    assert said(run) == {"rank 0 of 2", "rank 1 of 2"}

"""`ddpjob` and `Client` on a real API server, with one job followed on real pods from its
submission to its end.
"""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import new_namespace
from ddpjob import Client
from ddpjob.cli.main import main
from ddpjob.client.backends.backend import NoSuchJob
from ddpjob.client.backends.left_behind import read_left_behind
from ddpjob.client.job_client import JobFailed
from jobs import SCRIPTS, Jobs, job
from machine import slowness
from operator_process import install_crd
from testcluster import python_host
from testcluster.cluster import Cluster

Cli = Callable[..., tuple[int, str, str]]
JOB = "apiVersion: ddpjob.io/v1alpha1\nkind: DDPJob\nmetadata: {name: %s}\nspec: {image: a, script: b.py, nodes: 2}\n"


@pytest.fixture(scope="module")
def namespace(cluster: Cluster) -> Iterator[str]:
    """Use one namespace for all tests. Each test deletes its own jobs."""
    with new_namespace(cluster, "cli") as name:
        yield name


@pytest.fixture
def cli(
    cluster: Cluster, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Cli]:
    """Return the function `cli("get")`, which runs a command in the test's namespace. It returns
    the exit code and the output.
    """
    install_crd(cluster)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))

    def call(*words: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main(["-n", namespace, *words])
        return code, *capfd.readouterr()

    yield call
    cluster.kubectl("delete", "ddpjobs", "--all", "-n", namespace, "--wait=false")


def set_status(cluster: Cluster, namespace: str, name: str, **status: Any) -> None:
    patch = json.dumps({"status": status})
    cluster.kubectl("patch", "ddpjob", name, "-n", namespace, "--subresource=status", "--type=merge", "-p", patch)


def condition(kind: str, status: str, reason: str, message: str) -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "message": message,
            "lastTransitionTime": "2026-01-01T00:00:00Z"}  # fmt: skip


def test_jobs_can_be_read_and_changed_without_an_operator(cluster: Cluster, namespace: str, cli: Cli) -> None:
    Path("two.yaml").write_text(JOB % "one" + "---\n" + JOB % "two")
    code, out, _ = cli("submit", "two.yaml")
    assert code == 0 and [line.split(" (")[0] for line in out.splitlines()] == [
        "ddpjob one created",
        "ddpjob two created",
    ]
    assert cli("get", "-o", "name")[1].split() == ["ddpjob.ddpjob.io/one", "ddpjob.ddpjob.io/two"]
    assert cli("submit", "two.yaml")[0] == 2
    code, _, err = cli("-n", "typo", "submit", "two.yaml")
    assert code == 2 and 'namespaces "typo" not found' in err
    assert "no operator has reconciled it" in cli("why", "one")[1]
    # The printed manifest can be submitted again.
    code, out, _ = cli("get", "-o", "yaml")
    Path("list.yaml").write_text(out)
    assert cli("validate", "list.yaml")[0] == 0

    assert cli("scale", "one", "5")[1].startswith("ddpjob one not yet scaled to 5 nodes (")
    assert cli("suspend", "one")[0] == 0
    spec = cluster.kubectl_json("get", "ddpjob", "one", "-n", namespace)["spec"]
    assert spec["nodes"] == 5 and spec["runPolicy"]["suspend"] is True
    code, _, err = cli("scale", "three", "5")
    assert code == 2 and "no job three in namespace" in err and "jobs there: one, two" in err

    waits = [condition("Scheduled", "False", "ClaimNotFound", "claim ckpt does not exist")]
    set_status(cluster, namespace, "one", phase="Pending", conditions=waits)
    code, out, _ = cli("why", "one")
    assert code == 0 and "claim ckpt does not exist" in out and "What to do: Create the claim." in out
    assert "ClaimNotFound" in cli("describe", "one")[1]
    assert cli("wait", "one", "--timeout", "1")[0] == 124

    assert cli("delete", "one")[0] == 0
    assert cli("delete", "one")[0] == 2


def test_wait_ends_when_the_job_ends(cluster: Cluster, namespace: str, cli: Cli) -> None:
    for name in ("good", "bad", "gone"):
        Path("job.yaml").write_text(JOB % name)
        assert cli("submit", "job.yaml")[0] == 0

    def later() -> None:
        done = [condition("Complete", "True", "Finished", "all")]
        set_status(cluster, namespace, "good", phase="Complete", conditions=done)
        failed = [condition("Failed", "True", "RestartBudgetSpent", "ValueError: x")]
        set_status(cluster, namespace, "bad", phase="Failed", conditions=failed)
        cluster.kubectl("delete", "ddpjob", "gone", "-n", namespace)

    timer = threading.Timer(1.0, later)
    timer.start()
    assert cli("wait", "good", "--timeout", "1m")[0] == 0
    code, _, err = cli("wait", "bad")
    assert code == 1 and "bad failed: RestartBudgetSpent" in err and "ValueError: x" in err
    code, _, err = cli("wait", "gone")
    timer.join()
    assert code in (1, 2) and ("was deleted" in err or "no job gone" in err)
    assert cli("why", "bad")[0] == 1


def test_validation_by_the_server_covers_the_job_and_its_pods(cluster: Cluster, namespace: str, cli: Cli) -> None:
    Path("job.yaml").write_text(JOB % "asked")
    assert cli("validate", "--server", "job.yaml")[0] == 0
    pod = "{securityContext: {sysctls: [{name: 'a b', value: c}]}}"
    Path("job.yaml").write_text((JOB % "asked").replace("nodes: 2", f"nodes: 2, podTemplate: {{spec: {pod}}}"))
    assert cli("validate", "job.yaml")[0] == 0
    code, _, err = cli("validate", "--server", "job.yaml")
    assert code == 2 and "the job's pod asked-0-0: " in err and "sysctls[0].name" in err
    # a claim that the job would create
    template = "{spec: {accessModes: [ReadWriteMany], resources: {requests: {storage: 1Gi}}}}"
    storage = f"nodes: 2, storage: {{checkpoints: {{claimTemplate: {template}}}}}"
    Path("job.yaml").write_text((JOB % "asked").replace("nodes: 2", storage))
    assert cli("validate", "--server", "job.yaml")[0] == 0
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "disk"}}
    cluster.apply({**quota, "spec": {"hard": {"persistentvolumeclaims": "0"}}}, namespace=namespace)
    code, _, err = cli("validate", "--server", "job.yaml")
    assert code == 2 and "the job's claim asked-checkpoints (spec.storage.checkpoints.claimTemplate): " in err, err
    cluster.kubectl("delete", "quota", "disk", "--namespace", namespace)
    # fields of an existing job that must not change while it runs
    Path("job.yaml").write_text(JOB % "asked")
    assert cli("submit", "job.yaml")[0] == 0
    set_status(cluster, namespace, "asked", phase="Running")
    assert cli("validate", "--server", "job.yaml")[0] == 0
    assert "items" in cluster.kubectl_json("get", "pods", "-n", namespace)  # nothing was created
    assert cluster.kubectl_json("get", "pods", "-n", namespace)["items"] == []


def test_code_is_sent_with_the_job(cluster: Cluster, namespace: str, cli: Cli) -> None:
    Path("project/lib").mkdir(parents=True)
    Path("project/train.py").write_text("import lib.a\n")
    Path("project/lib/a.py").write_text("# a\n")
    Path("project/weights.bin").write_bytes(b"\xff\x00")
    words = ("submit", "--nodes", "2", "--gpus", "0", "--image", "a", "--name", "code", "-e", "A=b", "project")
    code, out, _ = cli(*words, "--dry-run", "--", "--lr", "1")
    shown = list(yaml.safe_load_all(out))
    assert code == 0 and [body["kind"] for body in shown] == ["ConfigMap", "DDPJob"]
    assert shown[1]["spec"]["args"] == ["--lr", "1"] and shown[1]["spec"]["env"] == [{"name": "A", "value": "b"}]
    assert cluster.kubectl_json("get", "ddpjobs", "-n", namespace)["items"] == []

    assert cli(*words)[0] == 0
    maps = [
        m
        for m in cluster.kubectl_json("get", "configmaps", "-n", namespace)["items"]
        if "code" in m["metadata"]["name"]
    ]
    [made] = maps
    assert made["metadata"]["ownerReferences"][0]["name"] == "code" and made["immutable"] is True
    template = cluster.kubectl_json("get", "ddpjob", "code", "-n", namespace)["spec"]["podTemplate"]["spec"]
    paths = {item["path"] for item in template["volumes"][0]["configMap"]["items"]}
    assert paths == {"train.py", "lib/a.py", "weights.bin"}
    # A refused job leaves no ConfigMap behind, which different code could not reuse.
    Path("project/train.py").write_text("import lib.a, os\n")
    assert cli(*words)[0] == 2
    names = [m["metadata"]["name"] for m in cluster.kubectl_json("get", "configmaps", "-n", namespace)["items"]]
    assert [name for name in names if "code" in name] == [made["metadata"]["name"]]


def test_doctor_reports_the_crd_and_the_operator(cluster: Cluster, cli: Cli) -> None:
    code, out, _ = cli("doctor")
    assert code in (0, 1)
    assert "ok    definition ddpjobs.ddpjob.io is the same as this client's" in out
    assert "sufficient for all commands" in out and "operator" in out


def test_an_unreachable_cluster_is_reported_in_one_clear_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for file in ("none", "broken"):
        (tmp_path / "broken").write_text("{not: [yaml")
        assert main(["--kubeconfig", str(tmp_path / file), "get"]) == 3
        err = capfd.readouterr().err
        assert "no cluster" in err and "Traceback" not in err and len(err.strip().splitlines()) <= 3, err
    names = {"cluster": "c", "user": "u"}
    away = {
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:9"}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "c", "context": names}],
        "current-context": "c",
    }
    (tmp_path / "away").write_text(yaml.safe_dump(away))
    assert main(["--kubeconfig", str(tmp_path / "away"), "get"]) == 3
    assert "the API server at https://127.0.0.1:9 (context c) does not answer" in capfd.readouterr().err


def test_the_commands_follow_a_job_from_its_submission_to_its_end(
    jobs: Jobs, cli: Cli, cluster: Cluster, namespace: str
) -> None:
    """To save time, a single job covers uploaded code, logs across a replacement, stacks, a kill, a
    restart, and `Client`.
    """
    words = ("submit", "--name", "live", "--nodes", "2", "--gpus", "0", "--image", python_host.IMAGE)
    steps = "--steps=10000"  # the job is deleted long before its end
    code, out, _ = cli(*words, str(SCRIPTS / "ddp_steps.py"), "--dry-run", "--", steps)
    code_map, body = yaml.safe_load_all(out)
    cluster.apply(code_map, namespace=namespace)
    host, template = python_host.overlay("trainer")["spec"], body["spec"]["podTemplate"]["spec"]
    template["volumes"] += host["volumes"]
    template["containers"][0]["volumeMounts"] += host["containers"][0]["volumeMounts"]
    template["containers"][0]["env"] = host["containers"][0]["env"]
    body["spec"]["imagePullPolicy"] = "IfNotPresent"
    Path("saved").mkdir()
    body["spec"]["storage"] = {"checkpoints": {"hostPath": str(Path("saved").absolute()), "shared": True}}
    Path("job.json").write_text(json.dumps(body))
    assert cli("submit", "job.json")[0] == 0
    assert cli("wait", "live", "--for", "Running", "--timeout", f"{round(120 * slowness())}s")[0] == 0
    # the group is Running, but its ranks may still be importing
    jobs.wait("steps", lambda: all(" step 2" in jobs.kubectl("logs", f"live-{index}-0") for index in (0, 1)))
    code, out, _ = cli("stacks", "live")
    assert code == 0 and "rank 0, process" in out and "rank 1, process" in out and "ddp_steps.py" in out

    client = Client(namespace=namespace, kubeconfig=str(cluster.kubeconfig))
    seen: set[str] = set()

    def follow() -> None:
        for pod, line in client.logs("live", follow=True):
            if line.strip():
                seen.add(pod)

    reader = threading.Thread(target=follow, daemon=True)
    reader.start()
    assert cli("kill", "live-1-0")[0] == 0
    jobs.wait("the log of the successor", lambda: "live-1-1" in seen)
    jobs.wait_phase("live", "Running")
    assert "Deleted" in cli("describe", "live")[1] and "Deleted" in cli("events", "live")[1]
    assert "live-1-0  Gone" in cli("logs", "live", "--ended")[1]
    code, out, _ = cli("logs", "live-1-0")
    assert code == 0 and " step 2" in out, "the pod's log has outlived the pod"
    code, out, _ = cli("logs", "live", "--index", "1", "--tail", "3")
    assert code == 0 and "[1-1 rank 1] " in out and "[0-0" not in out
    code, out, _ = cli("logs", "live", "--rank", "0", "--tail", "3")
    assert code == 0 and "[0-0 rank 0] " in out and "[1-1" not in out

    before = {name: pod["metadata"]["uid"] for name, pod in jobs.pods().items()}
    code, out, _ = cli("restart", "live")
    assert code == 0 and out.startswith("ddpjob live restarted")
    jobs.wait_phase("live", "Running")
    assert not set(before.values()) & {pod["metadata"]["uid"] for pod in jobs.pods().values()}
    assert jobs.status("live")["restarts"]["counted"] == 0

    client.suspend("live")
    jobs.wait_phase("live", "Suspended")
    assert client.get("live").phase == "Suspended" and "live" in [job.name for job in client.list()]
    client.delete("live")
    with pytest.raises((NoSuchJob, JobFailed)):
        client.wait("live", timeout=30 * slowness())
    reader.join(30 * slowness())
    assert not reader.is_alive()


def test_a_finished_job_is_rerun_with_its_checkpoints_or_in_a_fresh_folder(
    jobs: Jobs, cli: Cli, tmp_path: Path
) -> None:
    look = 'echo "found: $(ls $DDPJOB_CHECKPOINT_DIR)"; touch $DDPJOB_CHECKPOINT_DIR/mark-$RANDOM'
    storage = {"checkpoints": {"hostPath": str(tmp_path / "checkpoints"), "subPath": "runs"}}
    (tmp_path / "checkpoints").mkdir()
    jobs.apply(job("again", nodes=1, command=["bash", "-c", look], storage=storage))
    jobs.wait_phase("again", "Complete")

    def uid() -> str:
        found: str = jobs.read("apis/ddpjob.io/v1alpha1", "ddpjobs/again")["metadata"]["uid"]
        return found

    first = uid()
    code, out, err = cli("rerun", "again")
    assert code == 0 and "again created again (it was Complete); it resumes" in out, err
    second = uid()
    jobs.wait_phase("again", "Complete")
    assert second != first and "found: mark-" in jobs.kubectl("logs", "again-0-0", "--container=trainer")
    code, out, err = cli("rerun", "again", "--fresh")
    assert code == 0 and f"storage.checkpoints.subPath is now runs-after-{second[:8]}" in out, err
    jobs.wait_phase("again", "Complete")
    assert "found: \n" in jobs.kubectl("logs", "again-0-0", "--container=trainer")
    kept = {folder.name: len(list(folder.glob("mark-*"))) for folder in (tmp_path / "checkpoints").iterdir()}
    assert kept == {"runs": 2, f"runs-after-{second[:8]}": 1}, "a fresh run keeps the old checkpoints"


def add_up(factor: int) -> None:
    """Sum over the ranks of the group. Each rank is in a separate pod."""
    import os

    import ddpjob_report
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ranks = torch.tensor([factor * (dist.get_rank() + 1)])
    dist.all_reduce(ranks)
    ddpjob_report.report(step=1, steps=1, total=ranks)
    print(f"total {int(ranks)} in {os.environ['DDPJOB_POD']}", flush=True)
    dist.destroy_process_group()


def test_functions_scripts_and_modules_can_train_on_a_cluster(
    jobs: Jobs, cli: Cli, cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    """`Client.train` runs a function, a script and a module on two nodes each. `ddpjob plot` shows
    the running job.
    """
    client = Client(namespace=namespace, kubeconfig=str(cluster.kubeconfig))
    script = tmp_path / "sums.py"
    script.write_text(f"{inspect.getsource(add_up)}\nimport sys\nadd_up(int(sys.argv[1]))\n")
    common: dict[str, Any] = {"image": python_host.IMAGE, "nodes": 2, "gpus": 0}
    fields = {"imagePullPolicy": "IfNotPresent", "runPolicy": {"cleanPodPolicy": "None"}}

    def settings() -> dict[str, Any]:
        return {**fields, "podTemplate": python_host.overlay("trainer")}

    folder = tmp_path / "checkpoints"
    folder.mkdir()
    function = client.train(
        add_up, args={"factor": 10}, name="by-function", checkpoints=folder, settings=settings(), **common
    )
    file = client.train(script, args=["100"], name="by-script", settings=settings(), **common)
    words = ("--config", "digits", "train.epochs=1000", "train.threads=1")
    module = client.train("ddpjob_trainer", args=words, name="by-module", settings=settings(), **common)
    for made, total in ((function, 30), (file, 300)):
        done = client.wait(made, timeout=120 * slowness())
        assert done.phase == "Complete" and done.status.restarts.total == 0
        said = {(pod, line) for pod, line in client.logs(done) if line.startswith("total ")}
        assert said == {(pod, f"total {total} in {pod}") for pod in (f"{made.name}-0-0", f"{made.name}-1-0")}
        assert done.progress.metrics == {"total": total}

    # leftovers after the job and its pods are gone
    client.delete("by-function")
    left = read_left_behind(folder)
    assert (left.name, left.namespace, [line.world for line in left.lines]) == ("by-function", namespace, [2, None])
    assert left.lines[-1].ok and left.lines[-1].progress["metrics"] == {"total": 30}

    client.wait(module, goal="Running", timeout=120 * slowness())
    jobs.wait("the first step that it logs, of ten", lambda: jobs.step("by-module") > 10)
    code, out, error = cli("plot", "by-module")  # this reads the file in a pod
    assert code == 0, error
    assert out.startswith("by-module: 0 restarts\nloss") and "now" in out

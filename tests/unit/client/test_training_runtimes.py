"""TrainJobs of Kubeflow Trainer and their runtimes: the DDPJob has the runtime's settings, and
nothing is invented.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ddpjob.api.reader import validate
from ddpjob.cli.main import main
from ddpjob.client.manifests.convert_jobs import convert
from ddpjob.client.manifests.later_refusals import later_refusals
from ddpjob.client.manifests.training_runtimes import runtime_paths

RUNTIME = """
apiVersion: trainer.kubeflow.org/v1alpha1
kind: ClusterTrainingRuntime
metadata: {name: ours}
spec:
  mlPolicy: {numNodes: 2, torch: {numProcPerNode: 1}}
  podGroupPolicy: {coscheduling: {scheduleTimeoutSeconds: 100}}
  template:
    spec:
      replicatedJobs:
        - name: dataset-initializer
          template:
            metadata: {labels: {trainer.kubeflow.org/trainjob-ancestor-step: dataset-initializer}}
            spec:
              template:
                spec:
                  containers:
                    - name: dataset-initializer
                      image: ghcr.io/me/dataset:1
                      env: [{name: STORAGE_URI, value: hf://old}]
                      volumeMounts: [{name: work, mountPath: /workspace}]
                  volumes: [{name: work, persistentVolumeClaim: {claimName: work}}]
        - name: node
          dependsOn: [{name: dataset-initializer, status: Complete}]
          template:
            metadata: {labels: {trainer.kubeflow.org/trainjob-ancestor-step: trainer}}
            spec:
              template:
                spec:
                  containers:
                    - name: node
                      image: ghcr.io/me/train:1
                      command: [torchrun, /app/train.py]
                      env:
                        - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
                        - {name: A, value: b}
                        - {name: B, value: b}
                      resources: {limits: {nvidia.com/gpu: 1}}
                      volumeMounts: [{name: work, mountPath: /workspace}]
                  volumes: [{name: work, persistentVolumeClaim: {claimName: work}}]
"""
TRAIN_JOB = """
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: tune, namespace: ml}
spec:
  runtimeRef: {name: ours}
  initializer: {dataset: {storageUri: "hf://new"}}
  trainer: {numNodes: 3, args: [--epochs=2], env: [{name: B, value: c}]}
  podTemplateOverrides:
    - targetJobs: [{name: node}]
      spec: {nodeSelector: {gpu: a100}, containers: [{name: node, env: [{name: A, value: c}]}]}
    - targetJobs: [{name: dataset-initializer}]
      spec: {nodeSelector: {disk: large}}
"""
MULTI_NODE = """
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: multi-node}
spec:
  runtimeRef: {name: torch-distributed}
  trainer:
    numNodes: 2
    command: [torchrun, --no-python, python3, -c]
    args:
      - |
        import os
        print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
"""


def changed(text: str, path: str, value: Any) -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load(text)
    *parents, last = path.split(".")
    here = made
    for name in parents:
        here = here[name]
    here[last] = value
    return made


def test_a_runtime_in_the_same_file_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(f"{RUNTIME}---{TRAIN_JOB}")
    assert main(["convert", str(file)]) == 0
    out, err = capsys.readouterr()
    job = yaml.safe_load(out)
    mount = {"name": "work", "mountPath": "/workspace"}
    assert job["spec"] == {
        "image": "ghcr.io/me/train:1",
        "nodes": 3,
        "env": [{"name": "A", "value": "c"}, {"name": "B", "value": "c"}],
        "gpusPerNode": 1,
        "script": "/app/train.py",
        "args": ["--epochs=2"],
        "podTemplate": {
            "spec": {
                "volumes": [{"name": "work", "persistentVolumeClaim": {"claimName": "work"}}],
                "nodeSelector": {"gpu": "a100"},
                "initContainers": [
                    {
                        "name": "dataset-initializer",
                        "image": "ghcr.io/me/dataset:1",
                        "env": [{"name": "STORAGE_URI", "value": "hf://new"}],
                        "volumeMounts": [mount],
                    }
                ],
                "containers": [{"name": "trainer", "volumeMounts": [mount]}],
            }
        },
        "scheduling": {"onePodPerNode": False},
    }
    assert "env POD_IP: left out" in err and "initializer.dataset: runs as an init container" in err
    assert "coscheduling" in err and "--runtime" not in err and later_refusals(job) == []


def test_a_runtime_is_read_from_another_file_or_from_the_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.yaml").write_text(TRAIN_JOB)
    (tmp_path / "runtime.yaml").write_text(RUNTIME)
    assert main(["convert", str(tmp_path / "job.yaml")]) == 1
    assert "--runtime cluster" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "job.yaml"), "--runtime", str(tmp_path / "runtime.yaml")]) == 0
    first = capsys.readouterr().out
    assert main(["convert", str(tmp_path / "job.yaml"), "--runtime", str(tmp_path / "job.yaml")]) == 2
    asked = list[str]()

    class Cluster:
        namespace = "default"

        @property
        def api(self) -> Cluster:
            return self

        def optional(self, path: str) -> dict[str, Any]:
            asked.append(path)
            found: dict[str, Any] = yaml.safe_load(RUNTIME)
            del found["kind"]
            return found

    monkeypatch.setattr("ddpjob.cli.places.Place.cluster", lambda place: Cluster())
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "job.yaml"), "--runtime", "cluster"]) == 0
    assert capsys.readouterr().out == first
    assert asked == ["/apis/trainer.kubeflow.org/v1alpha1/clustertrainingruntimes/ours"]


def test_a_namespaced_runtime_is_read_from_the_jobs_namespace() -> None:
    named = changed(TRAIN_JOB, "spec.runtimeRef", {"name": "a", "kind": "TrainingRuntime"})
    ((kind, path),) = runtime_paths(named, "default")
    assert (kind, path) == (
        "TrainingRuntime",
        "/apis/trainer.kubeflow.org/v1alpha1/namespaces/ml/trainingruntimes/a",
    )
    assert list(runtime_paths({"kind": "PyTorchJob", "spec": {}}, "default")) == []


def test_the_train_job_takes_precedence_over_its_runtime() -> None:
    runtime = yaml.safe_load(RUNTIME)
    runtime["spec"]["podGroupPolicy"] = {"volcano": {}}
    job = changed(TRAIN_JOB, "spec.trainer", {"image": "other:1", "command": ["python", "a.py"], "numProcPerNode": 4})
    made = convert(job, [runtime])
    spec = made.job["spec"]
    assert validate(made.job) == [] and spec["scheduling"]["schedulerName"] == "volcano"
    assert (spec["image"], spec["script"], spec["nodes"], spec["procsPerNode"]) == ("other:1", "a.py", 2, 4)


def test_settings_of_a_runtime_that_are_not_converted_are_reported() -> None:
    runtime = yaml.safe_load(RUNTIME)
    runtime["spec"]["podGroupPolicy"] = {"volcano": {"networkTopology": {"mode": "hard"}}}
    jobset = runtime["spec"]["template"]
    jobset["metadata"] = {"annotations": {"scheduling.volcano.sh/queue-name": "research"}}
    jobset["spec"] |= {"failurePolicy": {"maxRestarts": 3}, "ttlSecondsAfterFinished": 60}
    jobset["spec"]["replicatedJobs"][1]["template"]["spec"] |= {"backoffLimit": 2, "podFailurePolicy": {}}
    jobset["spec"]["replicatedJobs"].append({"name": "logger", "template": {}})
    notes = "\n".join(convert(yaml.safe_load(TRAIN_JOB), [runtime]).notes)
    for lost in ("queue-name belonged to the JobSet", "failurePolicy of the runtime", "ttlSecondsAfterFinished of",
                 "backoffLimit of", "podFailurePolicy of", "networkTopology", "replicatedJobs logger"):  # fmt: skip
        assert lost in notes, lost
    assert "podTemplateOverrides and runtimePatches for dataset-initializer: left out" in notes
    assert notes.count("dataset-initializer") == 1


def test_patches_of_the_runtime_change_the_training_pods() -> None:
    pod = {"nodeSelector": {"gpu": "h100"}, "containers": [{"name": "node", "securityContext": {"runAsUser": 7}}]}
    jobs = [{"name": name, "template": {"spec": {"template": {"spec": pod}}}} for name in ("node", "launcher")]
    patch = {"manager": "me", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}
    job = changed(MULTI_NODE, "spec.runtimePatches", [patch])
    spec = convert(job, image="i").job["spec"]
    assert spec["podTemplate"]["spec"] == {
        "nodeSelector": {"gpu": "h100"},
        "containers": [{"name": "trainer", "securityContext": {"runAsUser": 7}}],
    }


def test_an_inline_script_stays_readable_in_the_converted_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.yaml").write_text(MULTI_NODE)
    assert main(["convert", str(tmp_path / "job.yaml"), "--image", "pytorch/pytorch"]) == 0
    out, err = capsys.readouterr()
    assert "  - |\n    import os\n    print(" in out and "spec.image" not in err
    assert yaml.safe_load(out)["spec"]["command"][:4] == ["torchrun", "--no-python", "--", "python3"]


@pytest.mark.parametrize("args", [[], ["--backend", "nccl"]])
def test_if_the_command_is_in_the_image_its_entry_point_is_requested(
    args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four of training-operator's nine examples leave the command to the image."""
    container = {"name": "pytorch", "image": "ghcr.io/me/mnist:1", "args": args}
    template = {"spec": {"containers": [container]}}
    replicas = {name: {"replicas": 1, "template": template} for name in ("Master", "Worker")}
    job = {"kind": "PyTorchJob", "metadata": {"name": "mnist"}, "spec": {"pytorchReplicaSpecs": replicas}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    assert main(["convert", str(tmp_path / "job.yaml")]) == 1
    err = capsys.readouterr().err
    assert "docker inspect -f" in err and "ghcr.io/me/mnist:1`, then convert" in err and "--script" in err
    assert main(["convert", str(tmp_path / "job.yaml"), "--script", "/opt/mnist.py"]) == 0
    spec = yaml.safe_load(capsys.readouterr().out)["spec"]
    assert (spec["script"], spec.get("args", [])) == ("/opt/mnist.py", args)

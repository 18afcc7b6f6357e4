"""Other operators' manifests and torchrun command lines become valid DDPJobs, and settings that get
lost are reported.
"""

from __future__ import annotations

import shlex
from copy import deepcopy
from typing import Any

import pytest
import yaml
from ddpjob.api.reader import validate
from ddpjob.client.backends.backend import Mistake
from ddpjob.client.manifests.convert_jobs import convert, convert_command
from ddpjob.client.manifests.later_refusals import later_refusals

PYTORCH_JOB = """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  name: mnist
  namespace: ml
  labels: {team: vision}
spec:
  nprocPerNode: "8"
  elasticPolicy: {minReplicas: 2, maxReplicas: 8, maxRestarts: 3, rdzvBackend: c10d, metrics: [{type: Resource}]}
  runPolicy: {cleanPodPolicy: None, ttlSecondsAfterFinished: 60, schedulingPolicy: {queue: a}}
  pytorchReplicaSpecs:
    Worker:
      replicas: 4
      restartPolicy: ExitCode
      template:
        metadata: {annotations: {sidecar.istio.io/inject: "false"}}
        spec:
          nodeSelector: {gpu: a100}
          priorityClassName: high
          restartPolicy: Never
          volumes:
            - {name: shm, emptyDir: {medium: Memory, sizeLimit: 16Gi}}
            - {name: data, persistentVolumeClaim: {claimName: data}}
          containers:
            - name: pytorch
              image: ghcr.io/me/train:1
              command: [torchrun, --nnodes=2:8, --nproc_per_node, "8", --rdzv_backend=c10d, --tee, "3", /app/train.py]
              args: ["--lr", "0.1"]
              env: [{name: A, value: b}]
              ports: [{containerPort: 23456}]
              resources: {limits: {nvidia.com/gpu: 8, memory: 64Gi}, requests: {cpu: 8}}
              volumeMounts: [{name: shm, mountPath: /dev/shm}, {name: data, mountPath: /data}]
            - {name: logger, image: busybox:1}
"""
TRAIN_JOB = """
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: tune}
spec:
  runtimeRef: {name: torch-distributed}
  suspend: true
  initializer: {dataset: {storageUri: hf://x}}
  trainer:
    image: ghcr.io/me/train:2
    numNodes: 3
    numProcPerNode: 4
    command: [python, -u, -m, my.train]
    args: [--epochs=3]
    resourcesPerNode: {limits: {nvidia.com/gpu: 4}}
"""


def valid(job: dict[str, Any]) -> dict[str, Any]:
    assert validate(job) == [] and later_refusals(job) == []
    spec: dict[str, Any] = job["spec"]
    return spec


def test_a_pytorch_job_is_converted() -> None:
    made = convert(yaml.safe_load(PYTORCH_JOB))
    assert made.job["metadata"] == {"name": "mnist", "namespace": "ml", "labels": {"team": "vision"}}
    assert valid(made.job) == {
        "image": "ghcr.io/me/train:1",
        "nodes": 4,
        "env": [{"name": "A", "value": "b"}],
        "gpusPerNode": 8,
        "resources": {"requests": {"cpu": 8}, "limits": {"memory": "64Gi"}},
        "script": "/app/train.py",
        "args": ["--lr", "0.1"],
        "torchrunArgs": ["--tee=3"],
        "elastic": {"minNodes": 2, "maxNodes": 8},
        "scheduling": {"priorityClassName": "high", "onePodPerNode": False},
        "storage": {"sharedMemory": "16Gi"},
        "runPolicy": {"ttlSecondsAfterFinished": 60, "cleanPodPolicy": "None"},
        "recovery": {"maxRestarts": 3},
        "podTemplate": {
            "metadata": {"annotations": {"sidecar.istio.io/inject": "false"}},
            "spec": {
                "nodeSelector": {"gpu": "a100"},
                "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
                "containers": [
                    {"name": "trainer", "volumeMounts": [{"name": "data", "mountPath": "/data"}]},
                    {"name": "logger", "image": "busybox:1"},
                ],
            },
        },
    }
    notes = "\n".join(made.notes)
    for lost in ("HorizontalPodAutoscaler", "schedulingPolicy", "restartPolicy ExitCode", "ports"):
        assert lost in notes


def test_a_train_job_is_converted() -> None:
    made = convert(yaml.safe_load(TRAIN_JOB))
    assert valid(made.job) == {
        "image": "ghcr.io/me/train:2",
        "nodes": 3,
        "gpusPerNode": 4,
        "module": "my.train",
        "args": ["--epochs=3"],
        "runPolicy": {"suspend": True},
        "scheduling": {"onePodPerNode": False},
    }
    assert any("initializer" in note for note in made.notes) and any("torch-distributed" in n for n in made.notes)


@pytest.mark.parametrize(
    ("line", "spec"),
    [
        ("torchrun train.py", {"script": "train.py"}),
        (
            "torchrun --standalone --nproc_per_node=4 -m my.train --lr 1",
            {"module": "my.train", "args": ["--lr", "1"], "gpusPerNode": 4},
        ),
        (
            "python3 -m torch.distributed.run --nnodes 1:4 --max-restarts 5 --rdzv-id=x a.py",
            {"nodes": 4, "elastic": {"minNodes": 1, "maxNodes": 4}, "recovery": {"maxRestarts": 5}, "script": "a.py"},
        ),
        (
            "torchrun --nnodes=2 --node_rank=0 --master_addr h a.py -- x",
            {"nodes": 2, "script": "a.py", "args": ["--", "x"]},
        ),
        (
            "python -m torch.distributed.launch --nproc_per_node=4 --use_env --master_port 29501 a.py --lr 1",
            {"script": "a.py", "args": ["--lr", "1"], "gpusPerNode": 4},
        ),
        (
            "OMP_NUM_THREADS=4 CUDA_VISIBLE_DEVICES=0,1 torchrun --virtual-local-rank --nproc-per-node=2 a.py",
            {
                "env": [{"name": "OMP_NUM_THREADS", "value": "4"}],
                "script": "a.py",
                "gpusPerNode": 2,
                "torchrunArgs": ["--virtual-local-rank"],
            },
        ),
        (
            "torchrun --nnodes=2 --nproc-per-node=2 --tee=3 --no-python ./a.sh --log x",
            {
                "command": ["torchrun", "--tee=3", "--no-python", "--", "./a.sh", "--log", "x"],
                "nodes": 2,
                "gpusPerNode": 2,
            },
        ),
        (
            "python3 -m torch.distributed.launch --use-env --no_python python3 -c 'print(1)'",
            {"command": ["python3", "-m", "torch.distributed.run", "--no-python", "--", "python3", "-c", "print(1)"]},
        ),
    ],
)
def test_a_command_line_is_converted(line: str, spec: dict[str, Any]) -> None:
    made = convert_command(shlex.split(line), image="a")
    assert valid(made.job) == {"image": "a", **spec}


def test_a_command_line_in_a_single_argument_is_split() -> None:
    assert valid(convert_command(["torchrun --nproc_per_node=2 a.py"], image="a").job)["script"] == "a.py"


@pytest.mark.parametrize(
    ("line", "signs"),
    [
        ("torchrun a.py 2>&1 | tee log", ">& |: scripts and modules are started without a shell"),
        ('torchrun a.py --lr $LR --out "$OUT" && date', "$LR $OUT &&: scripts and modules are started without a shell"),
        ("torchrun a.py --re='^a$|b' --text \"it's; fine\" --cost 5$ a\\;b", ""),
    ],
)
def test_shell_syntax_in_a_command_line_is_reported(line: str, signs: str) -> None:
    made = convert_command([line], image="a")
    assert valid(made.job)["script"] == "a.py"
    assert [note.partition(", so")[0] for note in made.notes] == [signs] * bool(signs)
    assert not convert_command(shlex.split(line), image="a").notes, "a shell has already expanded it"


def test_an_unset_shell_variable_does_not_turn_a_number_into_the_script() -> None:
    with pytest.raises(Mistake, match="--nnodes --nproc_per_node: the value is missing"):
        convert_command(shlex.split("torchrun --nnodes --nproc_per_node 4 a.py"), image="a")


def test_the_rank_argument_of_torchs_old_launcher_is_reported() -> None:
    line = ["python", "-m", "torch.distributed.launch", "a.py"]
    assert any("--local-rank" in note for note in convert_command(line, image="a").notes)
    assert not convert_command([*line[:3], "--use-env", "a.py"], image="a").notes


def test_arguments_of_the_images_entry_point_do_not_become_a_command() -> None:
    """The script in Kubeflow's own examples is the ENTRYPOINT of the image."""
    job = yaml.safe_load(PYTORCH_JOB)
    container = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    container |= {"command": None, "args": ["--backend", "nccl"]}
    made = convert(job)
    assert "command" not in made.job["spec"] and made.job["spec"]["args"] == ["--backend", "nccl"]
    assert any("the image defines the entry point" in note for note in made.notes)
    container["args"] = ["torchrun", "a.py", "--backend", "nccl"]
    assert valid(convert(job).job)["script"] == "a.py"
    container["args"] = ["a.py", "--backend", "nccl"]
    made = convert(job)
    assert valid(made.job)["script"] == "a.py" and made.job["spec"]["args"] == ["--backend", "nccl"]
    assert any("which used to be passed to the image's entry point" in note for note in made.notes)


@pytest.mark.parametrize("line", ["exec torchrun a.py --lr 1", "torchrun a.py --lr 1"])
def test_a_shell_that_only_starts_torchrun_is_removed_from_the_command(line: str) -> None:
    job = yaml.safe_load(PYTORCH_JOB)
    container = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    container |= {"command": ["sh", "-c", line], "args": None}
    made = valid(convert(job).job)
    assert (made["script"], made["args"]) == ("a.py", ["--lr", "1"])


@pytest.mark.parametrize("option", ["-lc", "-ic"])
def test_a_shell_that_reads_a_profile_stays_a_command(option: str) -> None:
    """The profile may set PATH, or activate an environment of conda."""
    job = yaml.safe_load(PYTORCH_JOB)
    container = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    container |= {"command": ["bash", option, "torchrun a.py"], "args": None}
    del job["spec"]["elasticPolicy"]
    assert valid(convert(job).job)["command"] == ["bash", option, "torchrun a.py"]


def test_a_shell_that_runs_nothing_stays_a_command() -> None:
    job = yaml.safe_load(PYTORCH_JOB)
    container = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    container |= {"command": ["sh", "-c", " "], "args": None}
    assert valid(convert(job).job)["command"] == ["sh", "-c", " "]


def test_a_shell_command_stays_a_command() -> None:
    job = yaml.safe_load(PYTORCH_JOB)
    container = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    container |= {"command": ["bash", "-c", "cd /app && torchrun train.py"], "args": None}
    made = convert(job)
    assert valid(made.job)["command"] == ["bash", "-c", "cd /app && torchrun train.py"]
    assert any("must start torchrun itself" in note for note in made.notes)
    container["command"] = ["bash", "-c", "torchrun --nproc_per_node=8 \\\n  train.py --lr 1"]
    assert valid(convert(job).job)["args"] == ["--lr", "1"]


@pytest.mark.parametrize("script", ["torchrun train.py\npython eval.py", "torchrun train.py # all", "torchrun ~/a.py"])
def test_a_shell_script_of_several_commands_is_not_joined_into_one(script: str) -> None:
    job = yaml.safe_load(PYTORCH_JOB)
    container = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    container |= {"command": ["sh", "-c", script], "args": None}
    assert valid(convert(job).job)["command"] == ["sh", "-c", script]


def test_settings_that_only_the_master_has_are_reported() -> None:
    job = yaml.safe_load(PYTORCH_JOB)
    replicas = job["spec"]["pytorchReplicaSpecs"]
    replicas["Master"] = deepcopy(replicas["Worker"]) | {"replicas": 1}
    assert not any("Master" in note for note in convert(job).notes)
    pod = replicas["Master"]["template"]["spec"]
    pod["nodeSelector"] = {"gpu": "h100"}
    pod["volumes"].append({"name": "secrets", "secret": {"secretName": "s"}})
    [note] = [note for note in convert(job).notes if "Master" in note]
    assert "template.spec.nodeSelector.gpu" in note and "template.spec.volumes" in note


def test_short_options_of_torchrun_are_kept() -> None:
    made = convert_command(shlex.split("torchrun -r 3 -t2 --role x -m my.train"), image="a")
    assert valid(made.job) == {"image": "a", "module": "my.train", "torchrunArgs": ["-r", "3", "-t", "2", "--role=x"]}


def test_values_that_are_not_numbers_are_refused() -> None:
    with pytest.raises(Mistake, match="--max-restarts=abc: must be a number"):
        convert_command(["torchrun", "--max-restarts=abc", "a.py"])
    job = yaml.safe_load(PYTORCH_JOB)
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] = "many"
    with pytest.raises(Mistake, match="PyTorchJob cannot be read"):
        convert(job)


def test_objects_of_other_kinds_are_not_converted() -> None:
    with pytest.raises(Mistake, match="kind MPIJob"):
        convert({"kind": "MPIJob"})
    with pytest.raises(Mistake, match="not a torchrun command line"):
        convert_command(["echo", "a"])
    with pytest.raises(Mistake, match=r"not a torchrun command line; write it as one .* spec\.command"):
        convert_command(["accelerate", "launch", "--use_fsdp", "a.py"])


def _of_four_gpus(command: list[str], **spec: Any) -> dict[str, Any]:
    container = {"name": "pytorch", "image": "a", "command": command, "resources": {"limits": {"nvidia.com/gpu": 4}}}
    replicas = {"Worker": {"replicas": 2, "template": {"spec": {"containers": [container]}}}}
    spec = {"pytorchReplicaSpecs": replicas, "runPolicy": {"backoffLimit": 10}, **spec}
    return {"kind": "PyTorchJob", "metadata": {"name": "a"}, "spec": spec}


@pytest.mark.parametrize(
    ("command", "processes"),
    [
        (["torchrun", "--nproc_per_node=4", "a.py"], None),
        (["torchrun", "--nproc-per-node", "2", "a.py"], 2),
        (["torchrun", "--nproc-per-node=auto", "a.py"], None),
        (["torchrun", "a.py"], None),  # nprocPerNode is auto if it is not set
        (["bash", "-c", "cd /app && torchrun a.py"], None),
        (["python", "a.py"], 1),
    ],
)
def test_torchrun_starts_the_same_number_of_processes_as_before(command: list[str], processes: int | None) -> None:
    made = convert(_of_four_gpus(command))
    assert valid(made.job).get("procsPerNode") == processes
    assert any("procsPerNode: set to 1, as before" in note for note in made.notes) == (processes == 1)


def test_torchruns_option_for_processes_takes_precedence_over_the_variable() -> None:
    made = convert(_of_four_gpus(["torchrun", "--nproc-per-node=8", "a.py"], nprocPerNode="2"))
    assert valid(made.job)["procsPerNode"] == 8


def test_a_train_job_with_torchrun_gets_one_process_per_gpu() -> None:
    trainer = {"image": "a", "command": ["torchrun", "a.py"], "resourcesPerNode": {"limits": {"nvidia.com/gpu": 4}}}
    made = convert({"kind": "TrainJob", "metadata": {"name": "a"}, "spec": {"trainer": trainer}})
    assert "procsPerNode" not in valid(made.job)


@pytest.mark.parametrize(
    ("limits", "devices", "resource"),
    [
        ({"nvidia.com/gpu": 4}, 4, None),
        ({"nvidia.com/mig-1g.5gb": 1}, 1, "nvidia.com/mig-1g.5gb"),
        ({"amd.com/gpu": "8"}, 8, "amd.com/gpu"),
        ({"habana.ai/gaudi": 8}, 8, "habana.ai/gaudi"),
        ({"huawei.com/Ascend910": 8}, 8, "huawei.com/Ascend910"),
        ({"gpu.intel.com/i915": 2}, 2, "gpu.intel.com/i915"),
        ({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000, "nvidia.com/gpucores": 30}, 1, None),
        ({"volcano.sh/vgpu-number": 1, "volcano.sh/vgpu-memory": 3000}, 1, "volcano.sh/vgpu-number"),
        ({"rdma/hca": 1, "hugepages-2Mi": "1Gi"}, 0, None),
    ],
)
def test_devices_are_recognized_by_their_resource_name(
    limits: dict[str, Any], devices: int, resource: str | None
) -> None:
    job = _of_four_gpus(["torchrun", "a.py"])
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["resources"] = {"limits": limits}
    trainer = {"image": "a", "command": ["torchrun", "a.py"], "resourcesPerNode": limits}
    for made in (convert(job), convert({"kind": "TrainJob", "metadata": {"name": "a"}, "spec": {"trainer": trainer}})):
        spec = valid(made.job)
        assert (spec["gpusPerNode"], spec.get("gpuResource")) == (devices, resource)
        rest = spec.get("resources", {}).get("limits", {})
        assert rest == {name: amount for name, amount in limits.items() if name not in (resource, "nvidia.com/gpu")}


@pytest.mark.parametrize(
    ("given", "noted"), [({}, True), ({"automountServiceAccountToken": True}, False), (None, False)]
)
def test_the_token_of_a_service_account_is_reported(given: dict[str, Any] | None, noted: bool) -> None:
    job = _of_four_gpus(["torchrun", "a.py"])
    if given is not None:
        pod = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
        pod |= {"serviceAccountName": "trainer", **given}
    made = convert(job)
    assert valid(made.job)
    assert any("automountServiceAccountToken: true" in note for note in made.notes) is noted


def test_resource_claims_are_kept() -> None:
    job = _of_four_gpus(["torchrun", "a.py"])
    pod = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    pod["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": "h100"}]
    pod["containers"][0]["resources"] = {"limits": {"cpu": 3}, "claims": [{"name": "gpu"}]}
    spec = valid(convert(job).job)
    assert spec["resources"] == {"limits": {"cpu": 3}} and spec["gpusPerNode"] == 0
    assert any("one process per device of resourceClaims; set procsPerNode to" in n for n in convert(job).notes)
    assert spec["podTemplate"]["spec"] == {
        "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "h100"}],
        "containers": [{"name": "trainer", "resources": {"claims": [{"name": "gpu"}]}}],
    }


@pytest.mark.parametrize("volume", [{"emptyDir": {"medium": "Memory"}}, {"hostPath": {"path": "/dev/shm"}}])
def test_shared_memory_without_a_limit_is_reported(volume: dict[str, Any]) -> None:
    job = yaml.safe_load(PYTORCH_JOB)
    assert not any("/dev/shm" in note for note in convert(deepcopy(job)).notes)
    pod = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    pod["volumes"][0] = {"name": "shm", **volume}
    made = convert(job)
    assert "storage" not in valid(made.job)
    assert any("/dev/shm" in note and "spec.storage.sharedMemory" in note for note in made.notes)


def test_a_job_without_workers_uses_the_masters_template() -> None:
    job = _of_four_gpus(["torchrun", "worker.py"])
    replicas = job["spec"]["pytorchReplicaSpecs"]
    replicas["Master"] = deepcopy(replicas["Worker"]) | {"replicas": 1}
    replicas["Master"]["template"]["spec"]["containers"][0]["command"] = ["torchrun", "master.py"]
    replicas["Worker"]["replicas"] = 0
    made = convert(job)
    assert (valid(made.job)["script"], made.job["spec"]["nodes"]) == ("master.py", 1)
    assert not any("Master" in note for note in made.notes)


def test_rendezvous_arguments_are_removed_because_the_operator_sets_them() -> None:
    """A PyTorchJob's usual command line uses variables that the pods of a DDPJob do not have."""
    line = (
        "torchrun --nnodes=$WORLD_SIZE --node_rank $RANK --master_addr=${MASTER_ADDR} --master_port=$MASTER_PORT \\\n"
        '  --rdzv_endpoint="$MASTER_ADDR:$MASTER_PORT" --nproc_per_node=4 a.py --lr 1'
    )
    made = convert(_of_four_gpus(["bash", "-c", line]))
    spec = valid(made.job)
    assert (spec["nodes"], spec["script"], spec["args"]) == (2, "a.py", ["--lr", "1"])
    assert not made.notes
    assert not convert(_of_four_gpus(["torchrun", "--nnodes=$(WORLD_SIZE)", "--node_rank=$(RANK)", "a.py"])).notes


@pytest.mark.parametrize(
    "script",
    [
        "cd /app && torchrun --node_rank=$RANK a.py",
        "torchrun --nnodes=$N a.py --rank=${RANK}",
        "torchrun -m a --node-rank=$RANK -x",
        "python a.py --node-rank=$RANK -x",
    ],
)
def test_variables_that_pods_of_a_ddpjob_do_not_have_are_reported(script: str) -> None:
    made = convert(_of_four_gpus(["bash", "-c", script]))
    assert valid(made.job)["command"] == ["bash", "-c", script]
    assert any("uses RANK, but these variables are not set" in note for note in made.notes)


def test_the_address_of_index_0_is_known_to_a_command() -> None:
    line = "accelerate launch --multi_gpu --config_file a --machine_rank $RANK --main_process_ip $MASTER_ADDR a.py"
    notes = convert(_of_four_gpus(["bash", "-c", line])).notes
    assert any("command: uses RANK, but" in note and "write DDPJOB_INDEX" in note for note in notes)
    made = convert(_of_four_gpus(["bash", "-c", line.replace("--machine_rank $RANK", "")]))
    assert not any("not set" in note for note in made.notes)


def test_a_generate_name_field_is_kept() -> None:
    job = _of_four_gpus(["torchrun", "a.py"]) | {"metadata": {"generateName": "tune-", "namespace": "ml"}}
    made = convert(job)
    assert made.job["metadata"] == {"generateName": "tune-", "namespace": "ml"}
    assert valid(made.job) and any("`kubectl apply` requires metadata.name" in note for note in made.notes)


def test_devices_of_a_second_kind_stay_in_the_resources() -> None:
    job = yaml.safe_load(PYTORCH_JOB)
    container = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    container["resources"] = {"limits": {"rdma/hca_gpu": 1, "nvidia.com/gpu": 8}, "requests": {"rdma/hca_gpu": 1}}
    spec = valid(convert(job).job)
    assert (spec["gpusPerNode"], spec.get("gpuResource")) == (8, None)
    assert spec["resources"] == {"requests": {"rdma/hca_gpu": 1}, "limits": {"rdma/hca_gpu": 1}}


@pytest.mark.parametrize(
    ("policies", "options", "spec", "restarts"),
    [
        (["Never"], [], {}, 0),
        (["Never"], ["--max-restarts=3"], {}, 3),
        (["Never"], [], {"elasticPolicy": {"maxRestarts": 100}}, 100),
        (["Never"], [], {"runPolicy": {"backoffLimit": 5}}, 0),
        (["OnFailure"], ["--max-restarts=3"], {"runPolicy": {"backoffLimit": 0}}, 3),
        (["OnFailure"], ["--max-restarts=0"], {"runPolicy": {"backoffLimit": 5}}, 5),
        (["OnFailure"], ["--max-restarts=2"], {"elasticPolicy": {"maxRestarts": 100}}, 2),
        (["Never", None], [], {}, None),
        (["OnFailure"], ["--max-restarts=3"], {}, 3),
    ],
)
def test_a_job_restarts_as_often_as_torchrun_or_its_pods_did(
    policies: list[str | None], options: list[str], spec: dict[str, Any], restarts: int | None
) -> None:
    pod = {"containers": [{"image": "a", "command": ["torchrun", *options, "a.py"]}]}
    parts = ({"restartPolicy": policy, "template": {"spec": pod}} for policy in policies)
    replicas = dict(zip(("Worker", "Master"), parts, strict=False))
    made = convert({"kind": "PyTorchJob", "metadata": {"name": "a"}, "spec": {"pytorchReplicaSpecs": replicas, **spec}})
    assert valid(made.job).get("recovery", {}).get("maxRestarts") == restarts
    assert any("restartPolicy Never" in note for note in made.notes) == (len(policies) > 1)
    said = [note for note in made.notes if "runPolicy.backoffLimit: not set, so failed pods were restarted" in note]
    assert bool(said) == (policies != ["Never"] and "runPolicy" not in spec)
    assert not said or f"a DDPJob fails after {10 if restarts is None else restarts} counted restarts" in said[0]


@pytest.mark.parametrize(
    ("policy", "elastic"),
    [
        ({"rdzvBackend": "c10d"}, {"minNodes": 4}),
        ({"maxReplicas": 8}, {"minNodes": 4, "maxNodes": 8}),
        ({"minReplicas": 2}, {"minNodes": 2}),
    ],
)
def test_without_min_replicas_a_group_stays_complete(policy: dict[str, Any], elastic: dict[str, int]) -> None:
    """Kubeflow's default for minReplicas is maxReplicas, or else the number of workers."""
    job = yaml.safe_load(PYTORCH_JOB)
    job["spec"]["elasticPolicy"] = policy
    assert valid(convert(job).job)["elastic"] == elastic


def test_a_fraction_of_a_gpu_is_refused_with_its_name() -> None:
    job = _of_four_gpus(["torchrun", "a.py"])
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    worker["resources"] = {"limits": {"nvidia.com/gpu": "1.5"}}
    with pytest.raises(Mistake, match=r"^resources\.limits\.nvidia\.com/gpu: 1\.5 is not a whole number of GPUs"):
        convert(job)


def test_fields_that_the_conversion_drops_are_reported() -> None:
    job = _of_four_gpus(["torchrun", "a.py"], elasticPolicy={"minReplicas": 1, "window": 3}, priority="high")
    job["spec"]["pytorchReplicaSpecs"]["Launcher"] = {"replicas": 1}
    job["spec"]["runPolicy"] = {"suspend": False, "graceSeconds": 3}
    lost = ("priority", "pytorchReplicaSpecs.Launcher", "runPolicy.graceSeconds", "elasticPolicy.window")
    assert [note for note in convert(job).notes if "left out" in note] == [
        f"{name}: left out, because the field is unknown" for name in lost
    ]
    trainer = {"image": "a", "command": ["torchrun", "a.py"], "numNodes": 2, "framework": "x"}
    spec = {"trainer": trainer, "podSpecOverrides": [{}], "labels": {"a": "b"}, "activeDeadlineSeconds": 60}
    made = convert({"kind": "TrainJob", "metadata": {"name": "a"}, "spec": spec})
    assert valid(made.job)["runPolicy"] == {"activeDeadlineSeconds": 60}
    notes = "\n".join(made.notes)
    assert all(f"{name}: " in notes for name in ("trainer.framework", "podSpecOverrides", "labels"))


def test_a_command_that_is_not_a_list_is_refused() -> None:
    job = _of_four_gpus(["torchrun", "a.py"])
    container = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    container["command"] = "torchrun a.py"
    with pytest.raises(Mistake, match=r"command: must be a list, not 'torchrun a\.py'"):
        convert(job)
    container["command"] = ["torchrun", "--nproc-per-node", 2, "a.py"]
    with pytest.raises(Mistake, match="command: 2 is not a string; put it in quotes"):
        convert(job)


def test_a_command_line_of_torchx_is_converted() -> None:
    """The role in the command line has no name, and its rendezvous endpoint is a variable of
    Volcano.
    """
    line = (
        "torchrun --rdzv_backend c10d --rdzv_endpoint $${VC_TRAIN_0_HOSTS:=localhost}:29500 --rdzv_id 'x' --nnodes 2 "
        "--nproc_per_node 4 --tee 3 --role '' a.py --lr 1"
    )
    for made in (
        convert_command(["torchrun", *shlex.split(line)[5:]], image="a"),
        convert(_of_four_gpus(["bash", "-c", line])),
    ):
        spec = valid(made.job)
        assert (spec["nodes"], spec["torchrunArgs"], spec["args"]) == (2, ["--tee=3"], ["--lr", "1"])


def test_unknown_variables_in_args_and_env_are_reported() -> None:
    job = _of_four_gpus(["torchrun", "a.py", "--rank=$(RANK)"])
    container = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    container["env"] = [{"name": "STORE", "value": "tcp://$(MASTER_ADDR):1"}, {"name": "A", "value": None}]
    made = convert(job)
    assert valid(made.job)
    assert [note.partition(", but")[0] for note in made.notes] == [
        "args: the values use RANK",
        "env: the values use MASTER_ADDR",
    ]


def test_a_shared_memory_volume_that_other_containers_mount_is_kept() -> None:
    job = yaml.safe_load(PYTORCH_JOB)
    pod = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    mounts = [{"name": "shm", "mountPath": "/cache"}]
    pod["initContainers"] = [{"name": "fetch", "image": "busybox:1", "volumeMounts": mounts}]
    made = convert(job)
    spec = valid(made.job)
    assert spec["storage"] == {"sharedMemory": "16Gi"}
    assert [volume["name"] for volume in spec["podTemplate"]["spec"]["volumes"]] == ["shm", "data"]
    assert any("the volume shm stays mounted in its other places" in note for note in made.notes)


def test_selectors_by_the_other_operators_labels_are_reported() -> None:
    job = _of_four_gpus(["torchrun", "a.py"])
    selector = {"matchLabels": {"training.kubeflow.org/job-name": "a"}}
    spread = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": selector}
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["topologySpreadConstraints"] = [spread]
    [note] = convert(job).notes
    assert "training.kubeflow.org/job-name" in note and "ddpjob.io/job" in note


def test_a_command_copied_over_several_lines_is_a_single_command() -> None:
    """Regression: the backslash at the end of the first line was taken for the script."""
    line = "torchrun \\\n  --nproc_per_node=8 \\\n  train.py --x 'a b'\n"
    made = convert_command([line], image="a")
    assert valid(made.job) == {"image": "a", "script": "train.py", "args": ["--x", "a b"], "gpusPerNode": 8}
    assert not made.notes


@pytest.mark.parametrize(
    ("line", "sign"),
    [
        ("torchrun a.py\npython b.py", "a line break: scripts and modules are started without a shell"),
        ("torchrun a.py # all", "#: scripts and modules are started without a shell"),
    ],
)
def test_shell_text_after_a_command_line_is_reported(line: str, sign: str) -> None:
    [note] = convert_command([line], image="a").notes
    assert note.startswith(sign)


def test_variables_that_the_operator_replaces_do_not_become_arguments() -> None:
    line = "torchrun --nnodes=2 --rdzv_id $RANDOM --rdzv_endpoint $head_node_ip:29500 --nproc_per_node 4 a.py --lr 1"
    made = convert_command([line], image="a")
    assert valid(made.job)["args"] == ["--lr", "1"] and not made.notes
    [note] = convert_command([f"{line} --master-addr $head_node_ip"], image="a").notes
    assert "so these words became arguments" in note


def test_a_double_dash_ends_torchruns_options() -> None:
    made = convert_command(["torchrun", "--nproc-per-node=2", "--", "a.py", "--x"], image="a")
    assert valid(made.job) == {"image": "a", "script": "a.py", "args": ["--x"], "gpusPerNode": 2}
    line = "torchrun --node_rank=$RANK -- a.py --x"
    assert valid(convert(_of_four_gpus(["bash", "-c", line])).job)["script"] == "a.py"


def test_a_variable_number_of_processes_is_reported() -> None:
    """Regression: the job silently got one process for each GPU."""
    made = convert(_of_four_gpus(["torchrun", "--nproc_per_node=$(NPROC)", "a.py"]))
    assert "procsPerNode" not in valid(made.job)
    [note] = made.notes
    assert note.startswith("--nproc-per-node=$(NPROC): not a number; set procsPerNode")


@pytest.mark.parametrize("given", [{}, {"nprocPerNode": "auto"}, {"nprocPerNode": "gpu"}, {"nprocPerNode": "cpu"}])
def test_plain_python_stays_one_process_even_if_torchrun_would_start_more(given: dict[str, Any]) -> None:
    """Regression: `auto`, Kubeflow's own default, turned one process into four."""
    made = convert(_of_four_gpus(["python", "a.py"], **given))
    assert valid(made.job)["procsPerNode"] == 1
    assert [note[:31] for note in made.notes] == ["procsPerNode: set to 1, as befo"]


def test_a_process_count_that_plain_python_ignored_is_reported() -> None:
    made = convert(_of_four_gpus(["python", "a.py"], nprocPerNode="4"))
    assert valid(made.job) and ["procsPerNode: python started one process per pod" in n for n in made.notes] == [True]


@pytest.mark.parametrize(
    ("command", "given", "noted"),
    [
        (["torchrun", "a.py"], {}, True),
        (["torchrun", "-m", "a"], {"nprocPerNode": "auto"}, True),
        (["torchrun", "a.py"], {"nprocPerNode": "1"}, False),
        (["torchrun", "--nproc-per-node=1", "a.py"], {}, False),
        (["python", "a.py"], {}, False),
        (["bash", "-c", "cd /app && torchrun a.py"], {}, False),
    ],
)
def test_one_process_per_cpu_is_reported_as_not_converted(
    command: list[str], given: dict[str, Any], noted: bool
) -> None:
    job = _of_four_gpus(command, **given)
    del job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["resources"]
    made = convert(job)
    assert valid(made.job).get("procsPerNode", 1) == 1
    assert any("torchrun started one process per CPU" in note for note in made.notes) is noted


def test_the_rendezvous_timeout_is_kept() -> None:
    line = ["torchrun", "--rdzv-conf=timeout=900,join_timeout=1200", "a.py"]
    assert valid(convert_command(line, image="a").job)["rendezvous"] == {"joinTimeoutSeconds": 1200}
    elastic = {"minReplicas": 1, "rdzvConf": [{"key": "join_timeout", "value": "1800"}, {"key": "x", "value": "y"}]}
    made = convert(_of_four_gpus(["torchrun", "a.py"], elasticPolicy=elastic))
    assert valid(made.job)["rendezvous"] == {"joinTimeoutSeconds": 1800}


def test_a_queue_and_a_priority_of_a_pod_group_are_reported() -> None:
    policy = {"schedulingPolicy": {"queue": "team-a", "priorityClass": "high", "minAvailable": 2}}
    job = _of_four_gpus(["torchrun", "a.py"], runPolicy={"backoffLimit": 10, **policy})
    gang, queue, priority = convert(deepcopy(job)).notes
    assert "see spec.scheduling" in gang and "priorityClass high: left out" in priority
    assert "queue team-a: left out" in queue and "scheduling.volcano.sh/queue-name in podTemplate" in queue
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["priorityClassName"] = "high"
    assert not any("priorityClass" in note for note in convert(job).notes)


def test_settings_that_a_train_job_leaves_to_its_runtime_are_reported() -> None:
    """Regression: the job silently became one node without GPUs."""
    spec = {"runtimeRef": {"name": "r"}, "trainer": {"image": "a", "command": ["torchrun", "a.py"]}}
    notes = convert({"kind": "TrainJob", "metadata": {"name": "a"}, "spec": spec}).notes
    for name in ("numNodes", "resourcesPerNode"):
        assert any(note.startswith(f"trainer.{name}: comes from the runtime") for note in notes)


def test_resource_fields_refer_to_the_renamed_container() -> None:
    """Regression: the kubelet did not find a container named pytorch."""
    job = _of_four_gpus(["torchrun", "a.py"])
    pod = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]

    def cpus(name: str) -> dict[str, Any]:
        return {"resource": "limits.cpu", "containerName": name}

    pod["volumes"] = [{"name": "info", "downwardAPI": {"items": [{"path": "c", "resourceFieldRef": cpus("pytorch")}]}}]
    pod["containers"][0]["env"] = [{"name": "OMP_NUM_THREADS", "valueFrom": {"resourceFieldRef": cpus("pytorch")}}]
    pod["containers"] += [
        {"name": "b", "image": "b", "env": [{"name": "C", "valueFrom": {"resourceFieldRef": cpus("b")}}]}
    ]
    spec = valid(convert(job).job)
    [variable], made = spec["env"], spec["podTemplate"]["spec"]
    assert variable["valueFrom"]["resourceFieldRef"] == cpus("trainer")
    assert made["volumes"][0]["downwardAPI"]["items"][0]["resourceFieldRef"] == cpus("trainer")
    assert made["containers"][0]["env"][0]["valueFrom"]["resourceFieldRef"] == cpus("b")
    trainer: dict[str, Any] = {"image": "a", "command": ["torchrun", "a.py"]}
    trainer["env"] = [{"name": "A", "valueFrom": {"resourceFieldRef": cpus("node")}}]
    made = convert({"kind": "TrainJob", "metadata": {"name": "a"}, "spec": {"trainer": trainer}})
    assert valid(made.job)["env"][0]["valueFrom"]["resourceFieldRef"] == cpus("trainer")


def test_variables_from_the_other_operators_labels_are_reported() -> None:
    job = _of_four_gpus(["torchrun", "a.py"])
    field = {"fieldRef": {"fieldPath": "metadata.labels['training.kubeflow.org/replica-index']"}}
    container = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    container["env"] = [{"name": "INDEX", "valueFrom": field}]
    made = convert(job)
    assert valid(made.job)
    [note] = made.notes
    assert note.startswith("env: pods of a DDPJob do not have the label training.kubeflow.org/replica-index")


def test_null_replicas_count_as_one() -> None:
    job = _of_four_gpus(["torchrun", "a.py"])
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] = None
    assert valid(convert(job).job)["nodes"] == 1


@pytest.mark.parametrize(
    ("workers", "pod", "shared"),
    [
        (2, {}, True),
        (1, {}, False),
        (2, {"affinity": {"nodeAffinity": {}}}, True),
        (2, {"affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}}, False),
    ],
)
def test_converted_pods_may_still_share_a_kubernetes_node(workers: int, pod: dict[str, Any], shared: bool) -> None:
    """Regression: four pods with one GPU each waited for three Kubernetes nodes that do not
    exist.
    """
    job = _of_four_gpus(["torchrun", "a.py"])
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    worker["replicas"] = workers
    worker["template"]["spec"] |= pod
    spec = valid(convert(job).job)
    assert spec.get("scheduling") == ({"onePodPerNode": False} if shared else None)


@pytest.mark.parametrize(
    ("command", "context", "noted"),
    [
        (["bash", "-c", "apt-get update && apt-get install -y git && torchrun a.py"], {}, "command: runs apt-get;"),
        (["bash", "-c", "/usr/sbin/sshd; torchrun a.py"], {}, "command: runs sshd;"),
        (["bash", "-c", "pip install adapt-x && torchrun /opt/apt/a.py"], {}, ""),
        (["torchrun", "a.py", "apt"], {}, ""),
        (["torchrun", "a.py"], {"runAsUser": 0}, "securityContext.runAsUser: 0;"),
        (["torchrun", "a.py"], {"runAsUser": 0, "privileged": True}, ""),
        (["torchrun", "a.py"], {"runAsUser": 1000}, ""),
    ],
)
def test_lost_capabilities_that_root_needs_are_reported(
    command: list[str], context: dict[str, Any], noted: str
) -> None:
    job = _of_four_gpus(command)
    container = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    container["securityContext"] = context
    made = convert(job)
    assert valid(made.job)
    assert [note[: len(noted)] for note in made.notes if "capabilities" in note] == ([noted] if noted else [])


def test_ports_of_a_sidecar_are_reported() -> None:
    job = _of_four_gpus(["torchrun", "a.py"])
    containers = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    containers += [{"name": "tensorboard", "image": "b", "ports": [{"containerPort": 6006}]}]
    made = convert(job)
    assert valid(made.job)
    [note] = made.notes
    assert note.startswith(
        "ports of tensorboard: only the job's own pods can reach them; to admit other pods, set network.isolate: false"
    )


def test_arguments_of_an_entry_point_are_not_taken_for_a_program() -> None:
    """The input is Kubeflow's own example for torchtune. Regression: its first argument was started
    as a program.
    """
    trainer = {"args": ["dataset=tatsu-lab/alpaca"], "resourcesPerNode": {"limits": {"nvidia.com/gpu": 2}}}
    spec = {"runtimeRef": {"name": "torchtune-llama3.2-1b"}, "trainer": trainer}
    made = convert({"kind": "TrainJob", "metadata": {"name": "a"}, "spec": spec})
    assert made.job["spec"]["args"] == ["dataset=tatsu-lab/alpaca"] and "command" not in made.job["spec"]
    assert any(note.startswith("spec.script: missing, because the image defines") for note in made.notes)


def test_a_command_taken_from_args_is_reported() -> None:
    job = _of_four_gpus(["horovodrun", "python", "a.py"])
    container = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    container["args"] = container.pop("command")
    made = convert(job)
    assert valid(made.job)["command"] == ["horovodrun", "python", "a.py"]
    assert made.notes[0].startswith("command: taken from args (horovodrun ...), which used to be passed")

"""spec.podTemplate: what is refused with which remedy, and what is laid over which pod."""

from __future__ import annotations

from typing import Any

import pytest
from ddpjob.api.types import DDPJob, Json
from ddpjob.core.group import new_generation
from ddpjob.core.world import World
from ddpjob.objects.overlay import merge, problems
from ddpjob.objects.pods import build_coordinator, build_node
from ddpjob.objects.site import Site

SITE = Site(operator_key=b"0123456789abcdef")


def job(**spec: Any) -> DDPJob:
    body = {"image": "image", "script": "train.py", "nodes": 2, **spec}
    read = DDPJob.read({"metadata": {"name": "job", "namespace": "space", "uid": "uid"}, "spec": body})
    return DDPJob(name=read.name, namespace=read.namespace, uid=read.uid, spec=read.spec, status=new_generation(read, read.status, World()))


def node(index: int = 0, **spec: Any) -> Json:
    made = job(**spec)
    return build_node(made, made.status, SITE, index, 0)


def container(pod: Json, name: str = "trainer") -> Json:
    return next(c for c in pod["spec"]["containers"] if c["name"] == name)


def environment(pod: Json) -> dict[str, str]:
    return {e["name"]: e.get("value", "") for e in container(pod)["env"]}


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ({"spec": {"tolerationz": []}}, "spec.podTemplate.spec.tolerationz: no such field; did you mean tolerations?"),
        ({"spec": {"tolerations": {}}}, "spec.podTemplate.spec.tolerations: must be a list, not a mapping"),
        ({"spec": {"hostNetwork": "yes"}}, "spec.podTemplate.spec.hostNetwork: must be true or false, not a string ('yes')"),
        ({"metadata": {"labels": {"a": 1}}}, "spec.podTemplate.metadata.labels: values must be strings"),
        ({"metadata": {"labels": {"ddpjob.io/index": "1"}}}, "spec.podTemplate.metadata.labels.ddpjob.io/index: belongs to the operator"),
        ({"metadata": {"name": "x"}}, "spec.podTemplate.metadata.name: belongs to the operator"),
        ({"spec": {"hostname": "x"}}, "spec.podTemplate.spec.hostname: belongs to the operator"),
        ({"spec": {"volumes": [{"name": "ddpjob-shm"}]}}, "spec.podTemplate.spec.volumes[0].name: names that begin with ddpjob-"),
        ({"spec": {"containers": [{"image": "x"}]}}, "spec.podTemplate.spec.containers[0].name: missing"),
        ({"spec": {"containers": [{"name": "side"}]}}, "spec.podTemplate.spec.containers[0].image: missing for the sidecar side"),
        ({"spec": {"containers": [{"name": "coordinator", "image": "x"}]}}, "coordinator belongs to the operator"),
        ({"spec": {"containers": [{"name": "trainer", "command": ["x"]}]}}, "(use spec.command, spec.script or spec.module)"),
        (
            {"spec": {"containers": [{"name": "trainer", "env": [{"name": "DDPJOB_UID", "value": "1"}]}]}},
            "DDPJOB_UID is set by the operator",
        ),
        (
            {"spec": {"containers": [{"name": "trainer", "volumeMounts": [{"name": "a", "mountPath": "/dev/shm/"}]}]}},
            "/dev/shm/ holds spec.storage.sharedMemory",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_remedy(template: Json, message: str) -> None:
    found = problems(template)
    assert len(found) == 1 and message in found[0]


def test_a_right_template_has_no_problems() -> None:
    template = {
        "metadata": {"labels": {"team": "vision"}},
        "spec": {
            "nodeSelector": {"gpu": "a100"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "containers": [
                {"name": "trainer", "securityContext": {"runAsUser": 1000}, "env": [{"name": "A", "value": "1"}]},
                {"name": "side", "image": "x", "ports": [{"containerPort": 80}], "resources": {"limits": {"cpu": 1}}},
            ],
        },
    }
    assert problems(template) == ()


def test_the_overlay_adds_to_the_node_and_the_coordinator_takes_what_the_image_needs() -> None:
    template = {
        "metadata": {"labels": {"team": "vision"}},
        "spec": {
            "nodeSelector": {"gpu": "a100", "kubernetes.io/arch": "arm64"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "volumes": [
                {"name": "tools", "hostPath": {"path": "/opt/tools"}},
                {"name": "big", "persistentVolumeClaim": {"claimName": "big"}},
            ],
            "containers": [
                {
                    "name": "trainer",
                    "env": [{"name": "PATH", "value": "/opt/tools/bin"}],
                    "volumeMounts": [{"name": "tools", "mountPath": "/opt/tools"}, {"name": "big", "mountPath": "/big"}],
                },
                {"name": "side", "image": "x"},
            ],
        },
    }
    made = job(podTemplate=template)
    pod, host = build_node(made, made.status, SITE, 1, 0), build_coordinator(made, made.status, SITE)
    assert [c["name"] for c in pod["spec"]["containers"]] == ["trainer", "side"]
    assert pod["metadata"]["labels"]["team"] == host["metadata"]["labels"]["team"] == "vision"
    assert environment(pod)["PATH"] == "/opt/tools/bin" and environment(pod)["DDPJOB_INDEX"] == "1"
    assert {m["mountPath"] for m in container(pod)["volumeMounts"]} == {"/opt/ddpjob", "/dev/shm", "/checkpoints", "/opt/tools", "/big"}
    assert {m["mountPath"] for m in container(host, "coordinator")["volumeMounts"]} == {"/opt/ddpjob", "/opt/tools"}
    assert host["spec"]["nodeSelector"] == {"kubernetes.io/arch": "arm64"}, "it needs no GPU node, but the image's architecture"
    assert {"key": "gpu", "operator": "Exists"} in host["spec"]["tolerations"]
    assert [c["name"] for c in host["spec"]["containers"]] == ["coordinator"]


def test_gpus_shared_memory_and_the_spread() -> None:
    pod = node(gpusPerNode=4, gpuResource="amd.com/gpu", storage={"sharedMemory": "8Gi"})
    assert container(pod)["resources"]["limits"] == {"amd.com/gpu": 4}
    assert environment(pod)["DDPJOB_PROCS_PER_NODE"] == "4", "a process per GPU"
    shm = next(v for v in pod["spec"]["volumes"] if v["name"] == "ddpjob-shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert "podAntiAffinity" in pod["spec"]["affinity"]
    assert "affinity" not in node(scheduling={"onePodPerNode": False})["spec"]
    made = job(gpusPerNode=4)
    host = build_coordinator(made, made.status, SITE)
    assert "nvidia.com/gpu" not in container(host, "coordinator").get("resources", {}).get("limits", {}), "the coordinator asks no GPU"


def test_placement_master_has_the_coordinator_beside_node_0_only() -> None:
    names = [[c["name"] for c in node(i, rendezvous={"placement": "Master"})["spec"]["containers"]] for i in (0, 1)]
    assert names == [["trainer", "coordinator"], ["trainer"]]
    assert environment(node(1, rendezvous={"placement": "Master"}))["DDPJOB_COORDINATOR"] == "job-0-0.job:29401"


def test_a_command_gets_what_torchrun_reads_and_a_script_gets_arguments() -> None:
    given = environment(node(script=None, command=["bash"], procsPerNode=2))
    assert (
        given["PET_NNODES"] == "2:2" and given["PET_NPROC_PER_NODE"] == "2" and given["PET_RDZV_ENDPOINT"] == "job-coordinator-0.job:29400"
    )
    pod = node(args=["--lr", "0.1"], torchrunArgs=["--tee=3"])
    assert container(pod)["args"][-4:] == ["--tee=3", "train.py", "--lr", "0.1"]
    assert not any(name.startswith("PET_") for name in environment(pod))


def test_storage_tells_whether_all_nodes_see_the_same_checkpoints() -> None:
    assert environment(node())["DDPJOB_CHECKPOINT_SHARED"] == "0"
    shared = {"claimName": "c", "mountPath": "/save"}
    assert environment(node(storage={"checkpoints": shared}))["DDPJOB_CHECKPOINT_SHARED"] == "1"
    assert environment(node(storage={"checkpoints": shared}))["DDPJOB_CHECKPOINT_DIR"] == "/save"
    assert environment(node(storage={"checkpoints": {"hostPath": "/h"}}))["DDPJOB_CHECKPOINT_SHARED"] == "0"
    assert environment(node(storage={"checkpoints": {"hostPath": "/h", "shared": True}}))["DDPJOB_CHECKPOINT_SHARED"] == "1"


def test_merge_replaces_by_key_and_removes_by_null() -> None:
    base = {"volumes": [{"name": "a", "emptyDir": {}}], "x": {"y": 1, "z": 2}, "plain": [1]}
    merged = merge(base, {"volumes": [{"name": "a", "emptyDir": {"medium": "Memory"}}, {"name": "b"}], "x": {"y": None}, "plain": [2]})
    assert merged == {"volumes": [{"name": "a", "emptyDir": {"medium": "Memory"}}, {"name": "b"}], "x": {"z": 2}, "plain": [2]}
    assert base["x"] == {"y": 1, "z": 2}


def test_on_the_hosts_network_pods_still_find_each_other_by_name() -> None:
    assert node(podTemplate={"spec": {"hostNetwork": True}})["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert node(podTemplate={"spec": {"hostNetwork": True, "dnsPolicy": "Default"}})["spec"]["dnsPolicy"] == "Default"
    assert "dnsPolicy" not in node()["spec"]

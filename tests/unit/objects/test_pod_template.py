"""spec.podTemplate: refused templates with their remedies, and how a template is merged into each
pod.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from built import NOW, PLATFORM, container, environment, job, node
from ddpjob.api.job_spec import Json
from ddpjob.api.job_status import AvoidedNode
from ddpjob.objects import pod_template
from ddpjob.objects.budget import build_budget
from ddpjob.objects.pod_template import MOST_FAULTS, problems
from ddpjob.objects.pods import build_coordinator, build_node
from ddpjob.objects.strategic_merge import merge


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            {"spec": {"tolerationz": []}},
            "spec.podTemplate.spec.tolerationz: no such field; did you mean tolerations?",
        ),
        ({"spec": {"tolerations": {}}}, "spec.podTemplate.spec.tolerations: must be a list, not a mapping"),
        (
            {"spec": {"hostNetwork": "yes"}},
            "spec.podTemplate.spec.hostNetwork: must be true or false, not a string ('yes')",
        ),
        ({"metadata": {"labels": {"a": 1}}}, "spec.podTemplate.metadata.labels: values must be strings"),
        (
            {"spec": {"nodeSelector": {"gpu": True}}},
            "spec.podTemplate.spec.nodeSelector: values must be strings; put quotes around numbers and booleans",
        ),
        (
            {"spec": {"volumes": [{"name": "v", "csi": {"driver": "d", "volumeAttributes": {"cacheMegabytes": 500}}}]}},
            "spec.podTemplate.spec.volumes[0].csi.volumeAttributes: values must be strings",
        ),
        (
            {"metadata": {"labels": {"ddpjob.io/index": "1"}}},
            "spec.podTemplate.metadata.labels.ddpjob.io/index: the operator sets it",
        ),
        ({"metadata": {"name": "x"}}, "spec.podTemplate.metadata.name: the operator sets this field"),
        (
            {"spec": {"hostname": "x"}},
            "spec.podTemplate.spec.hostname: the operator sets this field; remove it, because",
        ),
        (
            {"spec": {"volumes": [{"name": "ddpjob-shm"}]}},
            "spec.podTemplate.spec.volumes[0].name: names with the prefix ddpjob-",
        ),
        ({"spec": {"containers": [{"image": "x"}]}}, "spec.podTemplate.spec.containers[0].name: missing"),
        (
            {"spec": {"containers": [{"name": "side"}]}},
            "spec.podTemplate.spec.containers[0].image: missing for the sidecar side",
        ),
        (
            {"spec": {"containers": [{"name": "coordinator", "image": "x"}]}},
            "coordinator is reserved for the operator's own container",
        ),
        (
            {"spec": {"containers": [{"name": "trainer", "command": ["x"]}]}},
            "; use spec.command, spec.script or spec.module instead",
        ),
        (
            {"spec": {"containers": [{"name": "trainer", "env": [{"name": "DDPJOB_UID", "value": "1"}]}]}},
            "the operator sets DDPJOB_UID",
        ),
        (
            {"spec": {"containers": [{"name": "trainer", "volumeMounts": [{"name": "a", "mountPath": "/dev/shm/"}]}]}},
            "/dev/shm/ is used for spec.storage.sharedMemory",
        ),
        (
            {"spec": {"containers": [{"name": "trainer", "restartPolicy": "Always"}]}},
            "spec.podTemplate.spec.containers[0].restartPolicy: the operator sets this field; remove",
        ),
        (
            {"spec": {"containers": [{"name": "trainer", "restartPolicyRules": [{"action": "Restart"}]}]}},
            "spec.podTemplate.spec.containers[0].restartPolicyRules: the operator sets this field",
        ),
        ({"spec": {"containers": [None]}}, "spec.podTemplate.spec.containers[0]: must not be null; remove it"),
    ],
)
def test_a_faulty_template_is_reported_with_its_remedy(template: Json, message: str) -> None:
    found = problems(template)
    assert len(found) == 1 and message in found[0]


def test_a_valid_template_has_no_problems() -> None:
    template = {
        "metadata": {"labels": {"team": "vision"}},
        "spec": {
            "nodeSelector": {"gpu": "a100"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "overhead": {"cpu": 1},
            "containers": [
                {"name": "trainer", "securityContext": {"runAsUser": 1000}, "env": [{"name": "A", "value": "1"}]},
                {"name": "side", "image": "x", "ports": [{"containerPort": 80}], "resources": {"limits": {"cpu": 1}}},
            ],
        },
    }
    assert problems(template) == ()


def test_the_template_applies_to_nodes_and_its_image_settings_to_the_coordinator() -> None:
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
                    "volumeMounts": [
                        {"name": "tools", "mountPath": "/opt/tools"},
                        {"name": "big", "mountPath": "/big"},
                    ],
                },
                {"name": "side", "image": "x"},
            ],
        },
    }
    made = job(podTemplate=template)
    pod, host = build_node(made, made.status, PLATFORM, 1, 0), build_coordinator(made, made.status, PLATFORM)
    assert [c["name"] for c in pod["spec"]["containers"]] == ["trainer", "side"]
    assert pod["metadata"]["labels"]["team"] == host["metadata"]["labels"]["team"] == "vision"
    assert environment(pod)["PATH"] == "/opt/tools/bin" and environment(pod)["DDPJOB_INDEX"] == "1"
    assert {m["mountPath"] for m in container(pod)["volumeMounts"]} == {
        "/opt/ddpjob",
        "/dev/shm",
        "/run/ddpjob",
        "/checkpoints",
        "/opt/tools",
        "/big",
    }
    assert {m["mountPath"] for m in container(host, "coordinator")["volumeMounts"]} == {"/opt/ddpjob", "/opt/tools"}
    assert host["spec"]["nodeSelector"] == {"kubernetes.io/arch": "arm64", "kubernetes.io/os": "linux"}, (
        "the coordinator needs no GPU node, but the image's architecture"
    )
    assert {"key": "gpu", "operator": "Exists"} in host["spec"]["tolerations"]
    assert [c["name"] for c in host["spec"]["containers"]] == ["coordinator"]


def test_gpus_shared_memory_and_spread_constraints_come_from_the_spec() -> None:
    pod = node(gpusPerNode=4, gpuResource="amd.com/gpu", storage={"sharedMemory": "8Gi"})
    assert container(pod)["resources"]["limits"] == {"amd.com/gpu": 4}
    assert environment(pod)["DDPJOB_PROCS_PER_NODE"] == "4", "each GPU has a process"
    shm = next(v for v in pod["spec"]["volumes"] if v["name"] == "ddpjob-shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert "podAntiAffinity" in pod["spec"]["affinity"]
    assert "affinity" not in node(scheduling={"onePodPerNode": False})["spec"]
    made = job(gpusPerNode=4)
    host = build_coordinator(made, made.status, PLATFORM)
    assert "nvidia.com/gpu" not in container(host, "coordinator").get("resources", {}).get("limits", {}), (
        "the coordinator requests no GPU"
    )


def test_with_placement_master_only_node_0_has_the_coordinator() -> None:
    names = [[c["name"] for c in node(i, rendezvous={"placement": "Master"})["spec"]["containers"]] for i in (0, 1)]
    assert names == [["trainer", "coordinator"], ["trainer"]]
    assert environment(node(1, rendezvous={"placement": "Master"}))["DDPJOB_COORDINATOR"] == "job-0-0.job:29401"


def test_a_command_gets_torchruns_variables_and_a_script_gets_arguments() -> None:
    given = environment(node(script=None, command=["bash"], procsPerNode=2))
    assert (
        given["PET_NNODES"] == "2:2"
        and given["PET_NPROC_PER_NODE"] == "2"
        and given["PET_RDZV_ENDPOINT"] == "job-coordinator-0.job:29400"
    )
    assert given["PET_MAX_RESTARTS"] == "0", "torchrun's own restarts are not reported"
    assert "is_host" not in given["PET_RDZV_CONF"], "--standalone could not host its store"
    assert given["PYTHON_EXEC"] == "/opt/ddpjob/ddpjob_worker.py"
    pod = node(args=["--lr", "0.1"], torchrunArgs=["--tee=3"])
    assert container(pod)["args"][-5:] == ["--tee=3", "--", "train.py", "--lr", "0.1"]
    pod = node(script=None, module="pkg.train", args=["--n=1"])
    assert container(pod)["args"][-4:] == ["-m", "--", "pkg.train", "--n=1"]
    assert not any(name.startswith("PET_") for name in environment(pod))


def test_all_pods_of_a_command_get_the_dns_name_of_index_0() -> None:
    made = job(script=None, command=["bash"])
    status = replace(made.status, slots=(replace(made.status.slots[0], attempt=4), *made.status.slots[1:]))
    for index in (0, 1):
        given = environment(build_node(made, status, PLATFORM, index, 4 - index))
        assert (given["MASTER_ADDR"], given["MASTER_PORT"]) == ("job-0-4.job", "29402")
    last = environment(node(script=None, command=["bash"], rendezvous={"port": 65534}))
    assert last["MASTER_PORT"] == "65533"
    beside = environment(node(script=None, command=["bash"], rendezvous={"placement": "Master"}))
    assert beside["PET_RDZV_CONF"].startswith("is_host=false,"), (
        "otherwise torchrun would host the store, which the pod already has"
    )


def test_torchrun_in_a_command_lets_its_workers_save_for_the_pods_grace_period() -> None:
    long = {"spec": {"terminationGracePeriodSeconds": 80}}
    assert environment(node(script=None, command=["bash"], podTemplate=long))["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "78"
    own = [{"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": "5"}]
    pod = node(script=None, command=["bash"], env=own)
    assert [e for e in container(pod)["env"] if e["name"] == own[0]["name"]] == own


def test_logs_are_kept_where_a_launcher_can_write_them() -> None:
    """Logs are not kept in a folder that is lost with the pod."""
    claim = {"checkpoints": {"claimName": "c"}}
    assert environment(node(storage=claim))["DDPJOB_LOGS_KEPT"] == "3"
    assert environment(node(storage=claim, runPolicy={"logsKept": 7}))["DDPJOB_LOGS_KEPT"] == "7"
    read_only = {"checkpoints": {"claimName": "c", "readOnly": True}}
    off = (node(), node(storage=read_only), node(storage=claim, runPolicy={"logsKept": 0}))
    for pod in (*off, node(storage=claim, script=None, command=["bash"])):
        assert "DDPJOB_LOGS_KEPT" not in environment(pod)


def test_a_variable_tells_whether_all_nodes_see_the_same_checkpoints() -> None:
    assert environment(node())["DDPJOB_CHECKPOINT_SHARED"] == "0"
    shared = {"claimName": "c", "mountPath": "/save"}
    assert environment(node(storage={"checkpoints": shared}))["DDPJOB_CHECKPOINT_SHARED"] == "1"
    assert environment(node(storage={"checkpoints": shared}))["DDPJOB_CHECKPOINT_DIR"] == "/save"
    assert environment(node(storage={"checkpoints": {"hostPath": "/h"}}))["DDPJOB_CHECKPOINT_SHARED"] == "0"
    assert (
        environment(node(storage={"checkpoints": {"hostPath": "/h", "shared": True}}))["DDPJOB_CHECKPOINT_SHARED"]
        == "1"
    )


@pytest.mark.parametrize(
    ("volume", "mount", "shared"),
    [
        ({"persistentVolumeClaim": {"claimName": "c"}}, {}, "1"),
        ({"nfs": {"server": "s", "path": "/p"}}, {"subPath": "runs"}, "1"),
        ({"csi": {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": {"bucketName": "b"}}}, {}, "1"),
        ({"azureFile": {"shareName": "s", "secretName": "s"}}, {}, "1"),
        ({"persistentVolumeClaim": {"claimName": "c"}}, {"subPathExpr": "$(DDPJOB_POD)"}, "0"),
        ({"emptyDir": {}}, {}, "0"),
        ({"hostPath": {"path": "/h"}}, {}, "0"),
        ({"persistentVolumeClaim": {"claimName": "c"}}, {"mountPath": "/checkpoints/"}, "1"),
    ],
)
def test_a_template_volume_for_checkpoints_determines_whether_they_are_shared(
    volume: Json, mount: Json, shared: str
) -> None:
    """Otherwise every node would write the same files, and none would resume from them."""
    mounted = {"name": "own", "mountPath": "/checkpoints", **mount}
    trainer = {"name": "trainer", "volumeMounts": [mounted]}
    pod = node(podTemplate={"spec": {"volumes": [{"name": "own", **volume}], "containers": [trainer]}})
    assert [m for m in container(pod)["volumeMounts"] if m["mountPath"].startswith("/checkpoints")] == [mounted]
    assert environment(pod)["DDPJOB_CHECKPOINT_SHARED"] == shared


def test_merge_replaces_list_entries_with_the_same_name() -> None:
    base = {"volumes": [{"name": "a", "emptyDir": {}}], "x": {"y": 1, "z": 2}, "plain": [1]}
    merged = merge(
        base,
        {"volumes": [{"name": "a", "emptyDir": {"medium": "Memory"}}, {"name": "b"}], "x": {"y": 3}, "plain": [2]},
    )
    assert merged == {
        "volumes": [{"name": "a", "emptyDir": {"medium": "Memory"}}, {"name": "b"}],
        "x": {"y": 3, "z": 2},
        "plain": [2],
    }
    assert base["x"] == {"y": 1, "z": 2}


def paths(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Return the path of every field of an object and of the first items of its lists."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield (*path, key)
            yield from paths(item, (*path, key))


POD_FIELDS = (
    *paths(
        {
            "metadata": {"labels": {"team": 1}, "annotations": {}},
            "spec": dict.fromkeys(
                (
                    *("terminationGracePeriodSeconds", "volumes", "containers", "initContainers", "tolerations"),
                    *("nodeSelector", "securityContext", "hostNetwork", "imagePullSecrets", "restartPolicy"),
                    *("dnsConfig", "topologySpreadConstraints", "serviceAccountName", "hostname"),
                )
            )
            | {"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": 1}}},
        }
    ),
)
TRAINER_FIELDS = ("volumeMounts", "env", "resources", "command", "image", "ports", "securityContext", "restartPolicy")


@pytest.mark.parametrize("path", POD_FIELDS, ids=".".join)
def test_a_null_in_the_template_changes_nothing(path: tuple[str, ...]) -> None:
    template: Any = None
    for key in reversed(path):
        template = {key: template}
    assert problems(template) == ()
    made, plain = job(podTemplate=template), job()
    for index in (0, 1):
        assert build_node(made, made.status, PLATFORM, index, 0) == build_node(plain, plain.status, PLATFORM, index, 0)
    assert build_coordinator(made, made.status, PLATFORM) == build_coordinator(plain, plain.status, PLATFORM)


@pytest.mark.parametrize("field", TRAINER_FIELDS)
@pytest.mark.parametrize("placement", ["Dedicated", "Master"])
def test_a_null_in_the_trainer_changes_nothing(field: str, placement: str) -> None:
    template = {"spec": {"containers": [{"name": "trainer", field: None}]}}
    assert problems(template) == ()
    made, plain = (job(rendezvous={"placement": placement}, **given) for given in ({"podTemplate": template}, {}))
    assert build_node(made, made.status, PLATFORM, 0, 0) == build_node(plain, plain.status, PLATFORM, 0, 0)
    assert build_coordinator(made, made.status, PLATFORM) == build_coordinator(plain, plain.status, PLATFORM)


def test_pods_share_one_domain_in_addition_to_the_templates_affinity() -> None:
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    near: Json = {"topologyKey": "zone", "labelSelector": {"matchLabels": {"app": "data"}}}
    template = {"spec": {"affinity": {"podAffinity": {required: [near]}}}}
    made = job(nodes=2, scheduling={"sameTopology": "example.com/rack"}, podTemplate=template)
    avoided = replace(made.status, avoided_nodes=(AvoidedNode(node="bad", until=NOW),))
    pod = build_node(made, avoided, PLATFORM, 1, 0)
    affinity, labels = pod["spec"]["affinity"], pod["metadata"]["labels"]
    rack, data = affinity["podAffinity"][required]
    assert rack["topologyKey"] == "example.com/rack" and data == near
    assert rack["labelSelector"]["matchLabels"].items() <= labels.items(), (
        "otherwise the first pod could not be scheduled"
    )
    assert labels["ddpjob.io/role"] in rack["labelSelector"]["matchExpressions"][0]["values"]
    assert affinity["nodeAffinity"] and affinity["podAntiAffinity"], "avoided nodes and one pod per node still apply"
    assert build_coordinator(made, made.status, PLATFORM)["spec"]["affinity"].keys() == {"podAffinity"}
    alone = job(nodes=1, scheduling={"sameTopology": "example.com/rack"})
    assert "affinity" not in build_node(alone, alone.status, PLATFORM, 0, 0)["spec"]


def test_affinity_of_the_template_is_added_to_the_operators_own() -> None:
    required, preferred = (f"{kind}DuringSchedulingIgnoredDuringExecution" for kind in ("required", "preferred"))
    away: Json = {"topologyKey": "rack", "labelSelector": {"matchLabels": {"app": "noisy"}}}
    fast: Json = {"weight": 1, "preference": {"matchExpressions": [{"key": "fast", "operator": "Exists"}]}}
    zone: Json = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "Exists"}]}]}
    template = {
        "spec": {
            "affinity": {
                "podAntiAffinity": {required: [away]},
                "nodeAffinity": {preferred: [fast], required: zone},
            }
        }
    }
    made = job(podTemplate=template)
    avoided = replace(made.status, avoided_nodes=(AvoidedNode(node="bad", until=NOW),))
    affinity = build_node(made, avoided, PLATFORM, 0, 0)["spec"]["affinity"]
    own = build_node(job(), avoided, PLATFORM, 0, 0)["spec"]["affinity"]
    assert affinity["podAntiAffinity"][required] == [*own["podAntiAffinity"][required], away]
    assert affinity["nodeAffinity"][preferred] == [*own["nodeAffinity"][preferred], fast]
    assert affinity["nodeAffinity"][required] == zone


def test_the_coordinator_avoids_the_same_nodes_and_prefers_the_jobs_machines() -> None:
    made = job(podTemplate={"spec": {"affinity": {"podAntiAffinity": {}}}})
    like = build_coordinator(made, made.status, PLATFORM)["spec"]["affinity"]
    [term] = like["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert term["podAffinityTerm"]["topologyKey"] == "kubernetes.io/arch"
    labels = node()["metadata"]["labels"]
    assert term["podAffinityTerm"]["labelSelector"]["matchLabels"].items() <= labels.items()
    avoided = replace(made.status, avoided_nodes=(AvoidedNode(node="bad", until=NOW),))
    affinity = build_coordinator(made, avoided, PLATFORM)["spec"]["affinity"]
    away = build_node(job(), avoided, PLATFORM, 0, 0)["spec"]["affinity"]["nodeAffinity"]
    assert affinity == like | {"nodeAffinity": away}
    assert '"bad"' in json.dumps(affinity)


@pytest.mark.parametrize(
    ("template", "rendezvous", "given"),
    [
        ("nvidia", {}, None),
        ("nvidia-cdi", {}, None),
        ("gvisor", {}, "gvisor"),
        ("nvidia", {"runtimeClassName": "kata"}, "kata"),
    ],
)
def test_the_coordinator_has_no_runtime_class_for_devices(template: str, rendezvous: Json, given: str | None) -> None:
    made = job(podTemplate={"spec": {"runtimeClassName": template}}, rendezvous=rendezvous)
    assert build_coordinator(made, made.status, PLATFORM)["spec"].get("runtimeClassName") == given
    assert node(podTemplate={"spec": {"runtimeClassName": template}})["spec"]["runtimeClassName"] == template


def test_the_coordinator_is_placed_as_rendezvous_requests() -> None:
    taint = {"key": "pool", "operator": "Exists"}
    template = {"spec": {"nodeSelector": {"gpu": "a100"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]}}
    made = job(podTemplate=template, rendezvous={"nodeSelector": {"pool": "system"}, "tolerations": [taint]})
    spec = build_coordinator(made, made.status, PLATFORM)["spec"]
    assert spec["nodeSelector"] == {"kubernetes.io/os": "linux", "pool": "system"}
    assert [t["key"] for t in spec["tolerations"] if "/" not in t["key"]] == ["gpu", "pool"]
    pod = build_node(made, made.status, PLATFORM, 0, 0)["spec"]
    assert pod["nodeSelector"] == {"gpu": "a100"} and taint not in pod["tolerations"]


def test_the_coordinator_is_not_privileged_and_has_no_device_variables() -> None:
    trainer = {
        "name": "trainer",
        "securityContext": {"privileged": True, "runAsUser": 7},
        "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}, {"name": "TZ", "value": "UTC"}],
    }
    made = job(gpusPerNode=1, podTemplate={"spec": {"containers": [trainer]}})
    own = container(build_coordinator(made, made.status, PLATFORM), "coordinator")
    env = {e["name"]: e.get("value") for e in own["env"]}
    assert "privileged" not in own["securityContext"] and own["securityContext"]["runAsUser"] == 7
    assert env["NVIDIA_VISIBLE_DEVICES"] == "void" and env["TZ"] == "UTC"
    assert environment(build_node(made, made.status, PLATFORM, 0, 0))["NVIDIA_VISIBLE_DEVICES"] == "all"


@pytest.mark.parametrize(
    ("spec", "given"),
    [
        ({"gpusPerNode": 0}, "void"),
        ({"gpusPerNode": 1}, None),
        ({"gpusPerNode": 0, "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}, "all"),
        ({"gpusPerNode": 0, "resources": {"limits": {"nvidia.com/mig-1g.5gb": 1}}}, None),
        ({"gpusPerNode": 0, "podTemplate": {"spec": {"resourceClaims": [{"name": "gpu"}]}}}, None),
    ],
)
def test_nodes_that_request_no_device_see_none_of_their_hosts_devices(spec: Json, given: str | None) -> None:
    assert environment(node(**spec)).get("NVIDIA_VISIBLE_DEVICES") == given


def test_a_pod_with_a_read_only_root_gets_a_temporary_folder_unless_it_has_one() -> None:
    closed: Json = {"name": "trainer", "securityContext": {"readOnlyRootFilesystem": True}}
    made = job(podTemplate={"spec": {"containers": [closed]}})
    for pod in (build_node(made, made.status, PLATFORM, 0, 0), build_coordinator(made, made.status, PLATFORM)):
        [folder] = [m for m in pod["spec"]["containers"][0]["volumeMounts"] if m["mountPath"] == "/tmp"]
        assert {"name": folder["name"], "emptyDir": {}} in pod["spec"]["volumes"]
    own = {
        "volumes": [{"name": "t", "emptyDir": {}}],
        "containers": [{**closed, "volumeMounts": [{"name": "t", "mountPath": "/tmp/"}]}],
    }
    mounts = container(node(podTemplate={"spec": own}))["volumeMounts"]
    assert [m["name"] for m in mounts if m["mountPath"].startswith("/tmp")] == ["t"]
    assert "ddpjob-tmp" not in json.dumps(node())


def test_the_coordinator_uses_the_architecture_of_the_required_affinity() -> None:
    """Otherwise an image for arm64 alone would be pulled on any machine without a GPU."""
    arch = {"key": "kubernetes.io/arch", "operator": "In", "values": ["arm64"]}
    gpu = {"key": "nvidia.com/gpu.product", "operator": "In", "values": ["GB200"]}

    def wanted(*terms: list[Json]) -> Json:
        required = {"nodeSelectorTerms": [{"matchExpressions": term} for term in terms]}
        affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
        made = job(podTemplate={"spec": {"affinity": affinity}})
        status = replace(made.status, avoided_nodes=(AvoidedNode(node="bad", until=NOW),))
        found: Json = build_coordinator(made, status, PLATFORM)["spec"]["affinity"]["nodeAffinity"]
        assert "preferredDuringSchedulingIgnoredDuringExecution" in found, "avoided nodes are excluded in addition"
        return found.get("requiredDuringSchedulingIgnoredDuringExecution", {})

    assert wanted([arch, gpu]) == {"nodeSelectorTerms": [{"matchExpressions": [arch]}]}
    assert wanted([gpu]) == wanted([arch], [gpu]) == {}, "any machine without a GPU will do"


def test_the_network_interface_is_set_for_nccl_and_gloo_unless_the_template_does() -> None:
    def seen(pod: Json) -> list[tuple[str, str]]:
        given = pod["spec"]["containers"][0]["env"]
        return [(e["name"], e["value"]) for e in given if e["name"].endswith("_IFNAME")]

    network = {"interface": "eth1"}
    assert seen(node()) == []
    assert seen(node(network=network)) == [("NCCL_SOCKET_IFNAME", "eth1"), ("GLOO_SOCKET_IFNAME", "eth1")]
    own = [{"name": "NCCL_SOCKET_IFNAME", "value": "ib0"}]
    assert seen(node(network=network, env=own)) == [("GLOO_SOCKET_IFNAME", "eth1"), ("NCCL_SOCKET_IFNAME", "ib0")]
    template = {"spec": {"containers": [{"name": "trainer", "env": own}]}}
    assert ("NCCL_SOCKET_IFNAME", "ib0") in seen(node(network=network, podTemplate=template))


def test_resource_claims_in_the_template_are_passed_through() -> None:
    claims = [{"name": "gpus", "resourceClaimTemplateName": "eight-gpus"}]
    trainer = {"name": "trainer", "resources": {"claims": [{"name": "gpus"}]}}
    template = {"spec": {"resourceClaims": claims, "containers": [trainer]}}
    assert problems(template) == ()
    given = {"gpusPerNode": 0, "resources": {"limits": {"memory": "1Gi"}}, "podTemplate": template}
    pod = node(**given)
    assert pod["spec"]["resourceClaims"] == claims
    assert pod["spec"]["containers"][0]["resources"] == {"limits": {"memory": "1Gi"}, "claims": [{"name": "gpus"}]}
    made = job(**given)
    coordinator = build_coordinator(made, made.status, PLATFORM)
    assert "resourceClaims" not in coordinator["spec"], "the coordinator needs no GPU"
    more = {"name": "trainer", "resources": {"claims": [{"name": "gpus"}], "limits": {"memory": "1Gi"}}}
    [fault] = problems({"spec": {"containers": [more]}})
    assert "only claims are allowed here" in fault


def test_on_the_host_network_pods_still_find_each_other_by_name() -> None:
    assert node(podTemplate={"spec": {"hostNetwork": True}})["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"
    exported = {"hostNetwork": True, "dnsPolicy": "ClusterFirst"}
    assert node(podTemplate={"spec": exported})["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert node(podTemplate={"spec": {"hostNetwork": True, "dnsPolicy": "Default"}})["spec"]["dnsPolicy"] == "Default"
    assert "dnsPolicy" not in node()["spec"]


@pytest.mark.parametrize("example", ["roce", "gpudirect-tcpx"])
def test_the_coordinator_does_not_request_a_fast_network_interface(example: str) -> None:
    """The coordinator requests no such device. A pod with the annotation but without the device
    would get no network at all.
    """
    spec = yaml.safe_load((Path(__file__).parents[3] / f"examples/{example}.yaml").read_text())["spec"]
    spec["podTemplate"]["metadata"]["annotations"]["note"] = "kept"
    made = job(**spec)
    annotations = [
        build(made, made.status, PLATFORM, *slot)["metadata"]["annotations"]
        for build, slot in ((build_node, (0, 0)), (build_coordinator, ()))
    ]
    assert annotations == [spec["podTemplate"]["metadata"]["annotations"], {"note": "kept"}]


@pytest.mark.parametrize(
    ("volume", "mount"),
    [
        ({"hostPath": {"path": "/dev/infiniband", "type": "Directory"}}, {}),
        ({"hostPath": {"path": "/run/nvidia/dcgm.sock", "type": "Socket"}}, {}),
        ({"hostPath": {"path": "/opt/device", "type": "CharDevice"}}, {}),
        ({"emptyDir": {"medium": "HugePages-2Mi"}}, {}),
        ({"hostPath": {"path": "/scratch"}}, {"subPathExpr": "$(NODE_NAME)/$(DDPJOB_INDEX)"}),
    ],
    ids=lambda part: json.dumps(part),
)
@pytest.mark.parametrize("placement", ["Dedicated", "Master"])
def test_the_coordinator_mounts_no_volume_that_only_training_pods_have(
    volume: Json, mount: Json, placement: str
) -> None:
    """The kubelet does not start a container whose volumes do not exist, or whose subPathExpr lacks
    a variable.
    """
    mounts = [{"name": "own", "mountPath": "/own", **mount}, {"name": "tools", "mountPath": "/opt/tools"}]
    volumes = [{"name": "own", **volume}, {"name": "tools", "hostPath": {"path": "/opt/tools", "type": "Directory"}}]
    volumes += [{"name": "daemon", "hostPath": {"path": "/var/lib/tcpx", "type": "Directory"}}]
    daemon = {"name": "daemon", "image": "i", "volumeMounts": [{"name": "daemon", "mountPath": "/daemon"}]}
    template = {"spec": {"volumes": volumes, "containers": [{"name": "trainer", "volumeMounts": mounts}, daemon]}}
    assert problems(template) == ()
    made = job(podTemplate=template, rendezvous={"placement": placement})
    pod = build_node(made, made.status, PLATFORM, 0, 0)
    assert [m for m in container(pod)["volumeMounts"] if m in mounts] == mounts
    host = pod if placement == "Master" else build_coordinator(made, made.status, PLATFORM)
    assert [m["name"] for m in container(host, "coordinator")["volumeMounts"]] == ["ddpjob-runtime", "tools"]
    if placement == "Dedicated":
        assert [v["name"] for v in host["spec"]["volumes"]] == ["ddpjob-runtime", "tools"]


def test_the_coordinators_pod_requests_no_sysctl_that_its_kubelet_may_refuse() -> None:
    context = {"runAsUser": 1000, "sysctls": [{"name": "net.core.somaxconn", "value": "4096"}]}
    made = job(podTemplate={"spec": {"securityContext": context}})
    assert build_node(made, made.status, PLATFORM, 0, 0)["spec"]["securityContext"].items() >= context.items()
    given = build_coordinator(made, made.status, PLATFORM)["spec"]["securityContext"]
    assert given["runAsUser"] == 1000 and "sysctls" not in given


def test_the_coordinators_pod_has_no_annotation_for_a_container_that_it_lacks() -> None:
    """The API server refuses such a pod. Kubernetes 1.29 has no other way to choose an AppArmor
    profile.
    """
    profile = {"container.apparmor.security.beta.kubernetes.io/trainer": "unconfined"}
    made = job(podTemplate={"metadata": {"annotations": {**profile, "note": "kept"}}})
    assert build_node(made, made.status, PLATFORM, 0, 0)["metadata"]["annotations"].items() >= profile.items()
    assert build_coordinator(made, made.status, PLATFORM)["metadata"]["annotations"] == {"note": "kept"}


def test_the_launcher_writes_its_termination_reason_to_the_templates_path() -> None:
    template = {"spec": {"containers": [{"name": "trainer", "terminationMessagePath": "/tmp/end"}]}}
    assert environment(node(podTemplate=template))["DDPJOB_TERMINATION_LOG"] == "/tmp/end"
    assert "DDPJOB_TERMINATION_LOG" not in environment(node())


@pytest.mark.parametrize(("written", "meant"), [(-1, 1), (0, 0), (600, 600), (10**12, 2**31)])
def test_a_grace_period_is_bounded(written: int, meant: int) -> None:
    """A negative one counts as one second, as in Kubernetes. Otherwise the launcher's deadline would
    be in the past. The API server accepts one of any length, but the coordinator does not.
    """
    pod = node(podTemplate={"spec": {"terminationGracePeriodSeconds": written}})
    assert environment(pod)["DDPJOB_GRACE_SECONDS"] == str(meant)
    assert pod["spec"]["terminationGracePeriodSeconds"] == meant


def test_a_variable_of_the_template_replaces_the_operators_as_a_whole() -> None:
    """The API server refuses a pod in which a variable has both a value and a source."""
    secret = {"secretKeyRef": {"name": "keys", "key": "token"}}
    own = [{"name": "TOKEN", "valueFrom": secret}, {"name": "NCCL_SOCKET_IFNAME", "valueFrom": secret}]
    template = {"spec": {"containers": [{"name": "trainer", "env": own}]}}
    spec: Json = {
        "env": [{"name": "TOKEN", "value": "test"}],
        "network": {"interface": "eth1"},
        "podTemplate": template,
    }
    assert [e for e in container(node(**spec))["env"] if e["name"] in ("TOKEN", "NCCL_SOCKET_IFNAME")] == own[::-1]


def test_the_disruption_budget_selects_training_pods_unless_disabled() -> None:
    def selected(pod: Json) -> bool:
        wanted = build_budget(job())["spec"]["selector"]["matchLabels"]
        return wanted.items() <= pod["metadata"]["labels"].items()

    made = job(spares=1)
    nodes = [build_node(made, made.status, PLATFORM, index, 0) for index in range(3)]
    assert [selected(pod) for pod in nodes] == [True, True, False], "the spare is not selected"
    assert not selected(build_coordinator(made, made.status, PLATFORM))
    assert not selected(node(scheduling={"disruptionBudget": False}))


def test_merge_does_not_modify_its_arguments() -> None:
    base = {"spec": {"containers": [{"name": "a", "env": [{"name": "x"}]}, {"name": "b"}], "affinity": {"k": {}}}}
    overlay = {"spec": {"containers": [{"name": "a", "env": [{"name": "y"}]}, {"name": "c"}], "affinity": {"l": {}}}}
    before = deepcopy((base, overlay))
    merged = merge(base, overlay)
    merged["spec"]["containers"][0]["env"].append({"name": "z"})
    merged["spec"]["affinity"]["l"]["m"] = 1
    assert (base, overlay) == before


@pytest.mark.parametrize(
    "spec",
    [
        {"volumes": [{"emptyDir": {}, "name": None}]},
        {
            "volumes": [{"emptyDir": {}}, {"name": "a", "emptyDir": {}}],
            "containers": [{"name": "trainer", "volumeMounts": [{"mountPath": "/b"}, {"name": "a"}]}],
        },
    ],
)
def test_list_items_without_a_name_are_left_to_the_api_server(spec: Json) -> None:
    """The API server refuses the pod and reports the item's position, which the condition shows.
    The operator raises no error.
    """
    assert problems({"spec": spec}) == ()
    made = job(podTemplate={"spec": spec})
    assert build_coordinator(made, made.status, PLATFORM)["spec"]["volumes"]
    assert build_node(made, made.status, PLATFORM, 0, 0)["spec"]["volumes"]


def test_a_failing_container_of_the_template_shows_its_last_log_lines() -> None:
    given = {"name": "fetch", "image": "i", "terminationMessagePolicy": "File"}
    template = {"spec": {"initContainers": [{"name": "wait", "image": "i"}, given], "containers": [{"name": "side"}]}}
    spec = node(podTemplate=template)["spec"]
    policies = {c["name"]: c["terminationMessagePolicy"] for c in (*spec["initContainers"], *spec["containers"])}
    assert policies == {"wait": "FallbackToLogsOnError", "fetch": "File"} | dict.fromkeys(
        ("trainer", "side"), "FallbackToLogsOnError"
    )
    assert node(podTemplate={"spec": {"initContainers": None}})


def test_after_twenty_faults_the_validation_stops_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []

    def compare(word: str, *_: object, **__: object) -> list[str]:
        compared.append(word)
        return []

    monkeypatch.setattr(pod_template.difflib, "get_close_matches", compare)
    found = problems({"spec": {f"terminationGracePeriodSecon{n}": 1 for n in range(20_000)}})
    assert len(found) == MOST_FAULTS + 1
    assert found[-1] == "spec.podTemplate: more than 20 faults; correct these, then check again"
    assert len(compared) == MOST_FAULTS + 1, "each string comparison takes a millisecond"
    exactly = problems({"spec": {f"terminationGracePeriodSecon{n}": 1 for n in range(MOST_FAULTS)}})
    assert len(exactly) == MOST_FAULTS and "more faults" not in exactly[-1]


def test_long_names_and_values_in_a_template_are_shortened_in_messages() -> None:
    long = "x" * 100_000
    for template in (
        {"spec": {long: 1}},
        {"spec": {"hostNetwork": long}},
        {"spec": {"containers": [{"name": long}]}},
        {"metadata": {"labels": {f"ddpjob.io/{long}": "1"}}},
    ):
        assert all(len(fault) < 500 for fault in problems(template))

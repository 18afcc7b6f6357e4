"""Job classes: the fields that a class may set, the values that a job gets, how lists merge, and
which jobs are refused.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from ddpjob.api.job import DDPJob
from ddpjob.api.job_classes import LARGEST_CLASS, JobClasses
from ddpjob.api.job_status import JobStatus
from ddpjob.api.merging import CLASS_FIELDS, with_class
from ddpjob.api.schema import schema_of
from ddpjob.api.submitted_code import mount_code
from ddpjob.controller.operator_settings import Settings, SettingsError
from ddpjob.objects.platform import Platform
from ddpjob.objects.pod_template import problems
from ddpjob.objects.pods import build_node

Json = dict[str, Any]
KEY = {"DDPJOB_OPERATOR_KEY": "0123456789abcdef"}


def body_of(spec: Json, labels: dict[str, str] | None = None) -> Json:
    metadata = {"name": "job", "namespace": "vision", "uid": "uid", "labels": labels or {}}
    return {"metadata": metadata, "spec": {"className": "c", "script": "train.py", **spec}}


def taken(spec: Json, given: Json, labels: dict[str, str] | None = None) -> DDPJob:
    """Return the job as it is read after its class has been recorded."""
    body = body_of(spec, labels)
    offered = JobClasses.read({"c": given}).offer(DDPJob.read(body)).job_class
    assert offered is not None
    job = DDPJob.read(body)
    status = json.loads(json.dumps(JobStatus(job_class=offered).write(job.spec)))
    return DDPJob.read({**body, "status": status})


def problems_of(spec: Json, given: Json, labels: dict[str, str] | None = None) -> tuple[str, ...]:
    return JobClasses.read({"c": given}).offer(DDPJob.read(body_of(spec, labels))).problems


# --- what a class may set


@pytest.mark.parametrize("path", CLASS_FIELDS)
def test_defaults_of_fields_that_a_class_may_set_are_absent_or_empty(path: str) -> None:
    assert schema_of(f"spec.{path}").get("default", {}) == {}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"spec": {"nodes": 4}}, r"c\.spec\.nodes: not allowed in a class"),
        ({"spec": {"gpusPerNode": 8}}, r"c\.spec\.gpusPerNode: not allowed in a class"),
        ({"spec": {"scheduling": {"onePodPerNode": False}}}, r"c\.spec\.scheduling\.onePodPerNode: not allowed"),
        ({"spec": {"scheduling": 3}}, r"c\.spec\.scheduling: not allowed in a class"),
        ({"spec": {"image": 12}}, r"c\.spec\.image: must be a string"),
        ({"spec": {"env": [{"value": "x"}]}}, r"c\.spec\.env"),
        ({"spec": {"notify": {}}}, r"c\.spec\.notify\.receiver: required"),
        (
            {"spec": {"podTemplate": {"spec": {"tolerationz": []}}}},
            r"c\.spec\.podTemplate\.spec\.tolerationz: no such field",
        ),
        (
            {"spec": {"podTemplate": {"spec": {"hostname": "x"}}}},
            r"c\.spec\.podTemplate\.spec\.hostname: the operator sets",
        ),
        ({"spec": []}, r"c\.spec: must be a mapping"),
        ({"fixed": ["nodes"]}, r"c\.fixed: a class cannot fix nodes"),
        ({"fixed": "image"}, r"c\.fixed: must be a list of strings"),
        ({"namespaces": "vision"}, r"c\.namespaces: must be a list of strings"),
        ({"limits": {"maxNodes": 0}}, r"c\.limits\.maxNodes: 0 is not an integer from 1"),
        ({"limits": {"maxNodes": True}}, r"c\.limits\.maxNodes"),
        ({"limits": {"maxNodes": 1, "maxPods": 3}}, r"c\.limits\.maxPods: unknown; the keys are maxNodes"),
        ({"limits": ["maxNodes"]}, r"c\.limits: must be a mapping with the keys maxNodes"),
        ({"limits": {"images": ["*"]}}, r"c\.limits\.images='\*'"),
        ({"queue": "a/b"}, r"c\.queue: 'a/b' is not a valid LocalQueue name"),
        ({"image": "x"}, r"c\.image: unknown; the fields are"),
        ([], r"c: must be a mapping"),
        ({"spec": {"podTemplate": {"metadata": {"annotations": {"a": "x" * LARGEST_CLASS}}}}}, r"c: must be at most"),
    ],
)
def test_a_faulty_class_is_reported_at_the_operators_start(given: Any, says: str) -> None:
    with pytest.raises(SettingsError, match=f"DDPJOB_OPERATOR_CLASSES: {says}"):
        Settings.from_environment(KEY | {"DDPJOB_OPERATOR_CLASSES": json.dumps({"c": given})})


@pytest.mark.parametrize("wrong", ["{", "[]", '{"A/b": {}}', json.dumps({f"c{n}": {} for n in range(101)})])
def test_invalid_settings_of_classes_are_reported(wrong: str) -> None:
    with pytest.raises(SettingsError, match="DDPJOB_OPERATOR_CLASSES"):
        Settings.from_environment(KEY | {"DDPJOB_OPERATOR_CLASSES": wrong})


def test_a_namespace_sees_only_the_classes_that_it_may_use() -> None:
    given = {"a": {"namespaces": ["vision"]}, "b": {}, "c": {"namespaces": ["speech"]}, "d": {"namespaces": []}}
    settings = Settings.from_environment(KEY | {"DDPJOB_OPERATOR_CLASSES": json.dumps(given)})
    offer = settings.classes.offer(DDPJob.read(body_of({"image": "i"})))
    assert offer.job_class is None and offer.known == ("a", "b")


# --- what a job gets


def test_a_null_counts_as_an_absent_field() -> None:
    """Values of a chart may be null, which removes a default of the chart."""
    read = JobClasses.read({"a": {"namespaces": None, "spec": {"image": "i", "env": None}, "fixed": None}})
    assert read == JobClasses.read({"a": {"spec": {"image": "i"}}})


def test_the_jobs_own_value_takes_precedence_and_the_class_fills_absent_fields() -> None:
    given = {"spec": {"image": "theirs", "workingDir": "/theirs", "scheduling": {"priorityClassName": "high"}}}
    job = taken({"image": "mine", "scheduling": {"onePodPerNode": False}}, given)
    assert (job.spec.image, job.spec.working_dir) == ("mine", "/theirs")
    assert (job.spec.scheduling.priority_class_name, job.spec.scheduling.one_pod_per_node) == ("high", False)


def test_fields_that_the_api_server_adds_do_not_count_as_the_jobs_own() -> None:
    stored = {"resources": {"requests": {}}, "podTemplate": {}, "scheduling": {"onePodPerNode": True}, "runPolicy": {}}
    given = {
        "spec": {"image": "i", "resources": {"limits": {"memory": "1Gi"}}, "preflight": {}},
        "fixed": ["resources", "podTemplate"],
    }
    assert problems_of(stored, given) == ()
    job = taken(stored, given)
    assert job.spec.resources["limits"] == {"memory": "1Gi"} and job.spec.preflight is not None


def test_lists_of_class_and_job_merge_by_name() -> None:
    own = {
        "env": [{"name": "B", "value": "mine"}, {"name": "C", "value": "mine"}],
        "imagePullSecrets": [{"name": "mine"}],
        "envFrom": [{"secretRef": {"name": "mine"}}],
        "resources": {"limits": {"cpu": 1}},
    }
    given = {
        "env": [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}],
        "imagePullSecrets": [{"name": "theirs"}, {"name": "mine"}],
        "envFrom": [{"secretRef": {"name": "theirs"}}],
        "resources": {"limits": {"cpu": 2, "memory": "1Gi"}},
    }
    merged = with_class(own, given)
    assert merged["env"] == [
        {"name": "A", "value": "1"},
        {"name": "B", "value": "mine"},
        {"name": "C", "value": "mine"},
    ], "the job's entry replaces the class's as a whole"
    assert [s["name"] for s in merged["imagePullSecrets"]] == ["theirs", "mine"]
    assert [s["secretRef"]["name"] for s in merged["envFrom"]] == ["theirs", "mine"]
    assert merged["resources"] == {"limits": {"cpu": 1, "memory": "1Gi"}}
    assert own["resources"] == {"limits": {"cpu": 1}}, "the job's own fields are unchanged"


def test_pod_templates_merge_as_kubernetes_does() -> None:
    given: Json = {
        "spec": {
            "image": "i",
            "podTemplate": {
                "spec": {
                    "volumes": [{"name": "cache", "emptyDir": {}}, {"name": "theirs", "emptyDir": {}}],
                    "tolerations": [
                        {"operator": "Exists", "effect": "NoExecute"},
                        {"key": "gpu", "operator": "Exists"},
                    ],
                    "nodeSelector": {"pool": "theirs", "arch": "x"},
                }
            },
        }
    }
    own: Json = {
        "spec": {
            "volumes": [{"name": "cache", "emptyDir": {"medium": "Memory"}}],
            "tolerations": [{"key": "spot", "operator": "Exists"}],
            "nodeSelector": {"pool": "mine"},
        }
    }
    job = taken({"podTemplate": own, "gpusPerNode": 0}, given)
    pod = build_node(job, job.status, Platform(operator_key=b"key"), 0, 0)["spec"]
    volumes = {v["name"]: v for v in pod["volumes"]}
    assert volumes["cache"]["emptyDir"] == {"medium": "Memory"} and "theirs" in volumes
    assert pod["nodeSelector"] == {"pool": "mine", "arch": "x"}
    keys = [t.get("key") for t in pod["tolerations"]]
    assert {None, "gpu", "spot"} <= set(keys)


@pytest.mark.parametrize(("effect", "kept"), [("NoSchedule", True), ("NoExecute", False), ("", False), (None, False)])
def test_a_toleration_with_a_different_effect_does_not_replace_the_operators(effect: str | None, kept: bool) -> None:
    """Without the operator's toleration, Kubernetes would wait 300 s."""
    mine = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": effect}
    job = taken({"podTemplate": {"spec": {"tolerations": [mine]}}}, {"spec": {"image": "i"}})
    pod = build_node(job, job.status, Platform(operator_key=b"key"), 0, 0)["spec"]
    found = [t for t in pod["tolerations"] if t["key"] == mine["key"]]
    assert len(found) == 1 + kept and found[-1].get("effect") == effect


def test_a_volume_with_a_different_source_replaces_the_volume_of_the_class() -> None:
    given = {"podTemplate": {"spec": {"volumes": [{"name": "s", "emptyDir": {}}, {"name": "t", "emptyDir": {}}]}}}
    mine = [{"name": "s", "persistentVolumeClaim": {"claimName": "c"}}, {"name": "t", "emptyDir": {"sizeLimit": "1Gi"}}]
    merged = with_class({"podTemplate": {"spec": {"volumes": mine}}}, given)
    assert merged["podTemplate"]["spec"]["volumes"] == mine


def test_a_probe_of_a_different_kind_replaces_the_probe_of_the_class() -> None:
    def sidecar(probe: dict[str, Any]) -> dict[str, Any]:
        return {"podTemplate": {"spec": {"containers": [{"name": "s", "livenessProbe": probe}]}}}

    http, command = {"httpGet": {"port": 80}, "periodSeconds": 5}, {"exec": {"command": ["true"]}}
    for mine, found in ((command, command | {"periodSeconds": 5}), ({"periodSeconds": 9}, http | {"periodSeconds": 9})):
        merged = with_class(sidecar(mine), sidecar(http))
        assert merged["podTemplate"]["spec"]["containers"] == [{"name": "s", "livenessProbe": found}]


def test_the_queue_of_the_class_applies_to_jobs_without_a_label() -> None:
    label = {"kueue.x-k8s.io/queue-name": "mine"}
    given = {"spec": {"image": "i"}, "queue": "gpus"}
    assert taken({}, given).queue == "gpus" and taken({}, given, label).queue == "mine"
    assert taken({}, {**given, "fixed": ["queue"]}, label).queue == "gpus"


def test_a_class_that_is_not_recorded_in_the_job_has_no_effect() -> None:
    job = taken({"image": "mine"}, {"spec": {"workingDir": "/theirs"}})
    body = body_of({"image": "mine", "className": "other"})
    assert DDPJob.read({**body, "status": job.status.write(job.spec)}).spec.working_dir is None


def test_only_equal_classes_have_the_same_hash() -> None:
    first, again, other = (
        JobClasses.read({"c": {"spec": {"image": image}, "namespaces": spaces}}).classes["c"].mark
        for image, spaces in (("a", ["x"]), ("a", ["y"]), ("b", ["x"]))
    )
    assert first == again != other, "a change of the permitted namespaces does not affect current users"


# --- what a job may not set


@pytest.mark.parametrize(
    ("spec", "given", "says"),
    [
        (
            {"image": "b"},
            {"spec": {"image": "a"}, "fixed": ["image"]},
            "spec.image: class c sets this field, so jobs of the class cannot set it",
        ),
        (
            {"podTemplate": {"spec": {"hostNetwork": True}}},
            {"fixed": ["podTemplate"]},
            "spec.podTemplate: jobs of class c",
        ),
        (
            {"env": [{"name": "A", "value": "2"}, {"name": "B", "value": "2"}]},
            {"spec": {"env": [{"name": "A", "value": "1"}]}, "fixed": ["env"]},
            "spec.env: class c sets A",
        ),
        (
            {"scheduling": {"priorityClassName": "high"}},
            {"fixed": ["scheduling.priorityClassName"]},
            "spec.scheduling.priorityClassName: jobs of class c cannot set it; remove it, or ask the platform team",
        ),
        ({"nodes": 2, "spares": 1}, {"limits": {"maxNodes": 2}}, "spec.nodes: 3 including spares, but class c allows"),
        ({"gpusPerNode": 8}, {"limits": {"maxGpusPerNode": 4}}, "spec.gpusPerNode: 8, but class c allows at most 4"),
        (
            {},
            {"limits": {"images": ["reg/team:1", "reg/ok/*"]}},
            "spec.image: image is not one of the images that class c",
        ),
        (
            {"image": "reg/a", "podTemplate": {"spec": {"initContainers": [{"name": "s", "image": "evil"}]}}},
            {"limits": {"images": ["reg/*"]}},
            "spec.podTemplate, container s: evil is not one of",
        ),
        (
            {
                "gpusPerNode": 4,
                "podTemplate": {
                    "spec": {"containers": [{"name": "s", "resources": {"limits": {"nvidia.com/gpu": "4"}}}]}
                },
            },
            {"limits": {"maxGpusPerNode": 4}},
            "spec.gpusPerNode: 8, but class c",
        ),
        (
            {"gpusPerNode": 0, "gpuResource": "example.com/none", "resources": {"limits": {"nvidia.com/gpu": 8}}},
            {"limits": {"maxGpusPerNode": 4}},
            "spec.gpusPerNode: 8, but class c",
        ),
        (
            {
                "gpusPerNode": 1,
                "podTemplate": {
                    "spec": {"containers": [{"name": "s", "resources": {"limits": {"nvidia.com/mig-3g.40gb": 2}}}]}
                },
            },
            {"limits": {"maxGpusPerNode": 2}},
            "spec.gpusPerNode: 3, but class c",
        ),
        ({"script": None, "command": ["x"]}, {"spec": {"preflight": {}}}, "spec.preflight: preflight cannot be used"),
    ],
)
def test_the_error_about_a_violation_names_the_field_the_class_and_the_remedy(
    spec: Json, given: Json, says: str
) -> None:
    body = {key: value for key, value in {"image": "image", "script": "s", **spec}.items() if value is not None}
    if "script" not in body:
        body["script"] = None
    found = JobClasses.read({"c": given}).offer(DDPJob.read(_without_script(body_of(body)))).problems
    assert len(found) == 1 and found[0].startswith(says), found


@pytest.mark.parametrize(
    ("init", "gpus"),
    [
        ([8], 8),  # for example, a check of the GPUs: the trainer gets the same GPUs after it has ended
        ([8, 8], 8),
        ([9], 9),
        (["1 stays"], 9),
        (["1 stays", 8], 9),
    ],
)
def test_gpus_of_init_containers_count_as_kubernetes_counts_them(init: list[Any], gpus: int) -> None:
    made = [
        {
            "name": f"c{number}",
            "image": "i",
            "resources": {"limits": {"nvidia.com/gpu": str(asked).split()[0]}},
            **({"restartPolicy": "Always"} if "stays" in str(asked) else {}),
        }
        for number, asked in enumerate(init)
    ]
    spec = {"image": "i", "gpusPerNode": 8, "podTemplate": {"spec": {"initContainers": made}}}
    found = problems_of(spec, {"limits": {"maxGpusPerNode": 8}})
    assert found == (
        () if gpus == 8 else (f"spec.gpusPerNode: {gpus}, but class c allows at most 8; lower gpusPerNode",)
    )


def test_devices_other_than_gpus_do_not_count() -> None:
    resources = {"limits": {"rdma/hca": 8, "nvidia.com/sriov_roce": 8, "vpc.amazonaws.com/efa": 32, "cpu": 96}}
    assert problems_of({"image": "i", "resources": resources}, {"limits": {"maxGpusPerNode": 1}}) == ()


def _without_script(body: Json) -> Json:
    return {**body, "spec": {name: value for name, value in body["spec"].items() if value is not None}}


def submitted(**pod: Any) -> Json:
    """Return the job that `ddpjob submit train.py` writes, with additions."""
    volume, mount = mount_code("job-code-12345678", [{"key": "train.py", "path": "train.py"}])
    trainer = {"name": "trainer", "volumeMounts": [mount]}
    return {"podTemplate": {"spec": {"volumes": [volume], "containers": [trainer], **pod}}}


def test_code_added_by_submit_does_not_count_as_the_users_pod_template() -> None:
    """Regression: a class that fixed podTemplate refused `ddpjob submit train.py`, although its
    user had written no template.
    """
    given = {"spec": {"image": "i", "podTemplate": {"spec": {"nodeSelector": {"gpu": "a"}}}}, "fixed": ["podTemplate"]}
    assert problems_of(submitted(), given) == () and problems_of(submitted(), {"fixed": ["podTemplate"]}) != ()
    assert problems_of({**submitted(), "image": "i"}, {"fixed": ["podTemplate"]}) == ()
    pod = taken(submitted(), given).spec.pod_template["spec"]
    assert pod["nodeSelector"] == {"gpu": "a"} and pod["volumes"][0]["configMap"]["name"] == "job-code-12345678"
    assert pod["containers"][0]["volumeMounts"][0]["mountPath"] == "/ddpjob-code"


@pytest.mark.parametrize(
    "pod",
    [
        {"hostNetwork": True},
        {"volumes": [{"name": "code", "hostPath": {"path": "/"}}]},
        {"volumes": [{"name": "code", "configMap": {"name": "a"}}, {"name": "x", "hostPath": {"path": "/"}}]},
        {"containers": [{"name": "trainer", "volumeMounts": [{"name": "code", "mountPath": "/etc"}]}]},
        {"containers": [{"name": "side", "image": "i"}]},
        {"containers": [3], "volumes": "x"},
    ],
)
def test_other_content_next_to_submitted_code_is_refused(pod: Json) -> None:
    given = {"spec": {"image": "i", "podTemplate": {"spec": {"nodeSelector": {"gpu": "a"}}}}, "fixed": ["podTemplate"]}
    assert "spec.podTemplate: class c sets this field" in problems_of(submitted(**pod), given)[0]
    whole = taken(submitted(**pod), given).spec.pod_template["spec"]
    assert "hostPath" not in json.dumps(whole) and "hostNetwork" not in whole
    own = {"podTemplate": {"spec": {"volumes": [{"name": "code", "emptyDir": {}}]}}}
    assert problems_of(submitted(), {"spec": {"image": "i", **own}, "fixed": ["podTemplate"]}), (
        "the volume name `code` belongs to the class"
    )


def test_a_class_that_fixes_variables_lets_the_job_set_others() -> None:
    given = {"spec": {"image": "i", "env": [{"name": "A", "value": "1"}]}, "fixed": ["env"]}
    spec = {"env": [{"name": "B", "value": "2"}]}
    assert problems_of(spec, given) == ()
    assert [e["name"] for e in taken(spec, given).spec.env] == ["B", "A"]


@pytest.mark.parametrize("item", ["gpu", None, 3, [], {"name": [], "key": {}}])
@pytest.mark.parametrize("field", ["tolerations", "volumes", "containers"])
def test_a_list_with_items_of_a_different_shape_is_reported_with_its_class(field: str, item: Any) -> None:
    pod = {
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "volumes": [{"name": "data", "emptyDir": {}}],
        "containers": [{"name": "trainer", "volumeMounts": [{"name": "data", "mountPath": "/data"}]}],
    }
    template = {"spec": {field: [item]}}
    job = taken({"image": "i", "podTemplate": template}, {"spec": {"podTemplate": {"spec": pod}}})
    assert any(f"spec.podTemplate.spec.{field}[0]" in fault for fault in problems(job.spec.pod_template))


@pytest.mark.parametrize("hostile", [{"spec": {"containers": 3}}, {"spec": []}, {"spec": {"containers": [3]}}])
def test_a_malformed_pod_template_is_left_to_its_own_validation(hostile: Any) -> None:
    given = {"spec": {"image": "i"}, "limits": {"images": ["i"], "maxGpusPerNode": 1}}
    assert problems_of({"podTemplate": hostile}, given) == ()


@pytest.mark.parametrize("amount", [True, [], {"a": 1}, "1e9", "-3", "9" * 400])
def test_a_gpu_amount_that_is_not_a_number_counts_as_too_many(amount: Any) -> None:
    container = {"name": "s", "image": "i", "resources": {"limits": {"nvidia.com/gpu": amount}}}
    given = {"limits": {"maxGpusPerNode": 8}}
    found = problems_of({"image": "i", "podTemplate": {"spec": {"containers": [container]}}}, given)
    assert found and found[0].startswith("spec.gpusPerNode")

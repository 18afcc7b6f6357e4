"""`ddpjob validate`: its input, and its messages about manifests that a cluster would refuse
immediately or later.
"""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from ddpjob.cli import preparing
from ddpjob.cli.main import main
from ddpjob.cli.places import Place

JOB = "apiVersion: ddpjob.io/v1alpha1\nkind: DDPJob\nmetadata: {name: t}\nspec:\n  image: a\n  script: b.py\n"
OTHER = JOB.replace("{name: t}", "{name: u}")
TEMPLATE = "  podTemplate: {spec: {%s}}\n"


def checked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["validate", *words])
    return code, *capsys.readouterr()


def trainer(fields: str) -> str:
    return JOB + TEMPLATE % f"containers: [{{name: trainer, {fields}}}]"


def in_spec(line: str) -> str:
    return f"{JOB}  {line}\n"


def making_claim(spec: str) -> str:
    return in_spec(f"storage: {{checkpoints: {{claimTemplate: {{spec: {{{spec}, {SIZE}}}}}}}}}") + "  nodes: 2\n"


SIZE = "resources: {requests: {storage: 1Gi}}"
REFUSED = {
    # field names that other operators use
    "replicas": (in_spec("replicas: 4"), "spec.replicas: unknown field; did you mean spec.nodes? (job.yaml, line 7)"),
    "nproc": (in_spec("nproc_per_node: 4"), "did you mean spec.procsPerNode?"),
    "volumes": (in_spec("volumes: []"), "write it as spec.podTemplate.spec.volumes"),
    "nodeselector": (in_spec("nodeselector: {}"), "write it as spec.podTemplate.spec.nodeSelector"),
    "mode": (in_spec("mode: Fast"), "did you mean spec.recovery.mode?"),
    "one_pod_per_node": (in_spec("onePodPerNode: false"), "did you mean spec.scheduling.onePodPerNode?"),
    "mpiReplicaSpecs": (in_spec("mpiReplicaSpecs: {}"), "(run `ddpjob convert -- torchrun ...` for a command line)?"),
    "runtimeRef": (in_spec("runtimeRef: {}"), "(run `ddpjob convert FILE` to translate the manifest)?"),
    "resourcesPerNode": (in_spec("resourcesPerNode: {}"), "spec.resources, and spec.gpusPerNode for GPUs?"),
    "rdzvBackend": (in_spec("rdzvBackend: c10d"), "did you mean spec.rendezvous?"),
    "schedulingPolicy": (in_spec("runPolicy: {schedulingPolicy: {}}"), "did you mean spec.scheduling?"),
    "claim_name": (in_spec("storage: {claimName: c}"), "did you mean spec.storage.data.claimName or spec.storage."),
    "receiver": (in_spec("receiver: a"), "did you mean spec.notify.receiver?"),
    "pods_name": (in_spec("podTemplate: {metadata: {name: a}}"), "unknown field; the fields are annotations, labels"),
    "host_ipc": (in_spec("host_ipc: true"), "write it as spec.podTemplate.spec.hostIPC"),
    "hostNetwork": (in_spec("hostNetwork: true"), "write it as spec.podTemplate.spec.hostNetwork"),
    "volumeMounts": (in_spec("volumeMounts: []"), "set it in the container named trainer"),
    "elastic": (in_spec("elastic: {min: 1}"), "did you mean spec.elastic.minNodes?"),
    # amounts, durations, lists
    "16GB": (in_spec("resources: {limits: {memory: 16GB}}"), "did you mean 16Gi or 16G?"),
    "4 cores": (in_spec("resources: {limits: {cpu: 4 cores}}"), "did you mean 4?"),
    "5m": (in_spec("recovery: {hangAfterSeconds: 5m}"), "must be an integer, not a string ('5m'); write 300 ("),
    "half": (in_spec("resources: {requests: {cpu: 0.5}}"), "not a number (0.5); put it in quotes ("),
    "999...9s": (in_spec(f"recovery: {{hangAfterSeconds: {'9' * 400}s}}"), "must be an integer, not a string"),
    "24h": (in_spec("runPolicy: {activeDeadlineSeconds: 24h}"), "write 86400"),
    "args": (in_spec("args: '--epochs=10 --lr 0.1'"), 'write ["--epochs=10", "--lr", "0.1"]'),
    "command": (JOB.replace("script: b.py", "command: torchrun x.py"), 'write ["torchrun", "x.py"]'),
    "env": (in_spec("env: {A: b, C: 1}"), 'write [{name: A, value: "b"}, {name: C, value: "1"}]'),
    # messages that use words instead of a pattern
    "namespace": (JOB.replace("name: t", "name: t, namespace: Team_A"), "did you mean team-a?"),
    "gpuResource": (in_spec("gpuResource: gpu"), "did you mean nvidia.com/gpu?"),
    # indentation
    "margin": (JOB.replace(" {name: t}", "\nname: t"), "name: unknown field; if it belongs to metadata, indent it"),
    "indentation": (JOB + " nodes: 2\n", "check the indentation of this line"),
    # accepted by the schema, but refused in the pods by the API server or the kubelet
    "module": (
        JOB.replace("script: b.py", "module: train.py"),
        "is the name of a file; set `script: train.py` instead",
    ),
    "a line": (
        JOB.replace("script: b.py", "script: python b.py --lr 0.1"),
        "spec.script: 'python b.py --lr 0.1' contains more than a file name; set `script: b.py` and `args: "
        '["--lr", "0.1"]` (',
    ),
    "torchrun": (JOB.replace("script: b.py", "script: torchrun b.py"), "set `script: b.py` ("),
    "torchrun alone": (
        JOB.replace("script: b.py", "module: torchrun"),
        "spec.module: torchrun is a launcher, and the job has its own; specify only the program that it starts (",
    ),
    "an interpreter": (
        JOB.replace("script: b.py", "script: /usr/bin/python3"),
        "python3 is a launcher",
    ),
    "a shell script": (
        JOB.replace("script: b.py", "script: run.sh"),
        "spec.script: run.sh is a shell script, and torchrun starts only Python scripts; specify the Python "
        "script that it starts, "
        'or set `command: ["bash", "run.sh"]` instead of script (',
    ),
    "a notebook": (
        JOB.replace("script: b.py", "script: a/b.ipynb"),
        "run `jupyter nbconvert --to script b.ipynb` to convert",
    ),
    "512m": (
        in_spec("resources: {limits: {memory: 512m}}"),
        "512m is 0.512 bytes, which is too small to be intended; did you mean 512Mi?",
    ),
    "64": (
        in_spec("storage: {sharedMemory: 64}"),
        "64 is 64 bytes, which is too small to be intended; did you mean 64Gi?",
    ),
    "16gi": (in_spec("resources: {limits: {memory: 16gi}}"), "did you mean 16Gi?"),
    "nfs": (in_spec("storage: {checkpoints: {nfs: 'host:/a'}}"), "write {server: host, path: /a}"),
    "label": (
        JOB.replace("name: t", "name: t, labels: {a: 'my team!'}"),
        "metadata.labels.a: 'my team!' is not a valid label value",
    ),
    "mount": (trainer("volumeMounts: [{name: x, mountPath: /x}]"), "volumeMounts[0].name: there is no volume x"),
    "mount without a name": (trainer("volumeMounts: [{mountPath: /x}]"), "volumeMounts[0].name: missing"),
    "variable without a name": (trainer("env: [{value: x}]"), "env[0].name: required, but missing"),
    "two mounts": (
        trainer("volumeMounts: [{name: ddpjob-shm, mountPath: /x}, {name: ddpjob-shm, mountPath: /x}]"),
        "something is already mounted at ",
    ),
    "requests": (in_spec("resources: {requests: {cpu: 4}, limits: {cpu: 2}}"), "4 is more than the limit, 2"),
    "devices without a limit": (
        in_spec("resources: {requests: {rdma/hca: 1}}"),
        "spec.resources.requests[rdma/hca]: must equal its limit, because this resource cannot be overcommitted; write "
        "it only in spec.resources.limits",
    ),
    "huge pages below their limit": (
        in_spec("resources: {requests: {hugepages-2Mi: 1Gi}, limits: {hugepages-2Mi: 2Gi}}"),
        "spec.resources.requests[hugepages-2Mi]: must equal its limit",
    ),
    "mem": (in_spec("resources: {requests: {mem: 4}}"), "did you mean memory?"),
    "-1": (in_spec("resources: {requests: {cpu: -1}}"), "-1 is less than 0"),
    "operator": (JOB + TEMPLATE % "tolerations: [{key: a, operator: exists}]", "did you mean Exists?"),
    "effect": (JOB + TEMPLATE % "tolerations: [{key: a, effect: NoSched}]", "did you mean NoSchedule?"),
    "no key": (JOB + TEMPLATE % "tolerations: [{value: a}]", "tolerations[0].key: missing"),
    "volume": (JOB + TEMPLATE % "volumes: [{emptyDir: {}}]", "volumes[0].name: required, but missing"),
    "same volume": (JOB + TEMPLATE % "volumes: [{name: a}, {name: a}]", "a is already the name of a volume"),
    "sizeLimit": (JOB + TEMPLATE % "volumes: [{name: a, emptyDir: {sizeLimit: 10GB}}]", "did you mean 10Gi or 10G?"),
    "account": (JOB + TEMPLATE % "serviceAccountName: My SA", "did you mean my-sa?"),
    "debugging containers": (
        JOB + TEMPLATE % "ephemeralContainers: [{name: debug, image: busybox}]",
        "spec.podTemplate.spec.ephemeralContainers: not allowed in a new pod; use `kubectl debug` once the pod runs",
    ),
    "priority": (in_spec("scheduling: {priorityClassName: High Prio}"), "did you mean high-prio?"),
    "claim": (in_spec("storage: {checkpoints: {claimName: My_Claim}}"), "did you mean my-claim?"),
    "a way back": (
        in_spec("storage: {data: {hostPath: /data/../other}}"),
        "spec.storage.data.hostPath: /data/../other contains '..', which Kubernetes does not allow; write the path",
    ),
    "a volume's way back": (
        JOB + TEMPLATE % "volumes: [{name: a, hostPath: {path: /data/..}}]",
        "spec.podTemplate.spec.volumes[0].hostPath.path: /data/.. contains '..'",
    ),
    "one node's claim": (
        making_claim("accessModes: [ReadWriteOnce]"),
        "claimTemplate.spec.accessModes: a claim with ReadWriteOnce can be mounted on only one Kubernetes node",
    ),
    "a claim's class": (
        making_claim("accessModes: [ReadWriteMany], storageClassName: My_NFS"),
        "claimTemplate.spec.storageClassName: 'My_NFS' is not a valid object name",
    ),
    "space": (JOB.replace("image: a", "image: 'my image'"), "is not a valid image name: it contains a space"),
    "upper case": (JOB.replace("image: a", "image: Ghcr.io/Me/Train:1"), "did you mean ghcr.io/me/train:1?"),
    "no tag": (JOB.replace("image: a", "image: 'train:'"), "the tag after ':' is missing"),
    "two trainers": (
        JOB + TEMPLATE % "containers: [{name: trainer}, {name: trainer}]",
        "containers[1].name: trainer is already the name of a container",
    ),
    "null": (JOB + TEMPLATE % "volumes: [null]", "volumes[0]: must be a mapping, not null (None) (job.yaml, line 7)"),
    # several
    "same name": (
        f"{JOB}---\n{JOB}",
        "t is already the name of an earlier DDPJob in this file; choose a different name",
    ),
    "PyTorchJob": ("apiVersion: kubeflow.org/v1\nkind: PyTorchJob\n", "run `ddpjob convert job.yaml` to translate it"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_error_suggests_the_field_that_was_probably_meant(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, answer = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(text)
    code, out, err = checked(capsys, "job.yaml")
    assert code == 2 and answer in err and "Traceback" not in err, err
    assert not out


@pytest.mark.parametrize(
    "image",
    ["a", "a:1", "ghcr.io/me/train:1.4", "REGISTRY/train:1", "localhost:5000/a/b", "[::1]:5000/a", "a__b/c--d.e:V_1.x",
     "repo@sha256:" + 64 * "a", "repo:1@sha256:" + 64 * "a"],
)  # fmt: skip
def test_image_names_that_the_kubelet_accepts_are_valid(
    image: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.yaml").write_text(JOB.replace("image: a", f"image: '{image}'"))
    assert checked(capsys, str(tmp_path)) == (0, f"{tmp_path / 'job.yaml'}: ddpjob t is valid\n", "")


def test_validate_accepts_a_valid_pod_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = (
        "tolerations: [{operator: Exists}, {key: a, value: b, effect: NoExecute}], "
        "volumes: [{name: code, configMap: {name: c}}, "
        "{name: ddpjob-shm, emptyDir: {medium: Memory, sizeLimit: 8Gi}}], "
        "containers: [{name: trainer, volumeMounts: [{name: code, mountPath: /c}, {name: ddpjob-data, mountPath: /d}]}]"
    )
    limits = "limits: {cpu: 1, hugepages-2Mi: 2048Mi, nvidia.com/mig-1g.5gb: 1}"
    resources = f"resources: {{requests: {{cpu: 500m, memory: 1Gi, hugepages-2Mi: 2Gi}}, {limits}}}"
    (tmp_path / "job.yaml").write_text(in_spec(resources) + TEMPLATE % template)
    code, _, err = checked(capsys, str(tmp_path / "job.yaml"))
    # The operator's check refuses its own volumes in a template. This is the only fault here.
    assert code == 2 and len(err.splitlines()) == 1 and "volumes[1].name: names with the prefix ddpjob-" in err


def test_validation_by_the_server_reports_that_it_does_not_cover_classes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: four jobs that their class refused were "valid, also in namespace ml"."""
    monkeypatch.setattr(Place, "cluster", lambda place: object())
    monkeypatch.setattr(preparing, "_ask_server", lambda *_: "namespace ml")
    note = "note: class h100 is checked only when the job starts"
    for text, said in ((in_spec("className: h100"), True), (JOB, False)):
        (tmp_path / "job.yaml").write_text(text)
        code, out, err = checked(capsys, "--server", str(tmp_path / "job.yaml"))
        assert code == 0 and "is valid, also in namespace ml" in out and (note in err) is said


def test_fields_that_a_class_may_set_are_not_reported_as_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mount, sidecar = "volumeMounts: [{name: datasets, mountPath: /d}]", "env: [{name: LEVEL, value: debug}]"
    template = TEMPLATE % f"containers: [{{name: trainer, {mount}}}, {{name: logger, {sidecar}}}]"
    (tmp_path / "job.yaml").write_text(in_spec("className: h100") + template)
    code, out, err = checked(capsys, str(tmp_path / "job.yaml"))
    assert (code, err) == (0, "") and "ddpjob t is valid" in out
    (tmp_path / "job.yaml").write_text(JOB + template)
    assert "missing for the sidecar logger" in checked(capsys, str(tmp_path / "job.yaml"))[2]


def test_all_documents_of_all_sources_are_validated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    items = "\n".join("- " + text.rstrip().replace("\n", "\n  ") for text in (JOB, OTHER + "  nodes: 0\n"))
    Path("two.yaml").write_text(f"{JOB}---\n{OTHER}")
    Path("list.yaml").write_text(f"apiVersion: v1\nkind: List\nitems:\n{items}\n")
    Path("jobs.yaml").write_text(f"apiVersion: ddpjob.io/v1alpha1\nkind: DDPJobList\nitems:\n{items}\n")
    Path("more").mkdir()
    Path("more/pod.yaml").write_text("apiVersion: v1\nkind: Pod\n")
    Path("more/job.yml").write_text(JOB)
    monkeypatch.setattr("sys.stdin", io.StringIO(JOB))
    code, out, err = checked(capsys, "two.yaml", "list.yaml", "-f", "jobs.yaml", "-", "more", "none.yaml")
    assert code == 2
    assert out.splitlines() == [
        *("two.yaml: ddpjob t is valid", "two.yaml: ddpjob u is valid", "list.yaml: ddpjob t is valid"),
        *("standard input: ddpjob t is valid", "more/job.yml: ddpjob t is valid", "jobs.yaml: ddpjob t is valid"),
    ]
    assert "none.yaml: no such file" in err
    for file in ("list.yaml", "jobs.yaml"):
        assert f"spec.nodes: 0 is less than 1, the smallest allowed ({file}, line 16)" in err


def test_files_that_a_run_has_written_into_the_folder_are_not_validated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DDPJOB_RUNS", raising=False)
    Path("runs/t/1").mkdir(parents=True)
    Path("runs/mine").mkdir()
    for file in ("job.yaml", "runs/t/1/job.json", "runs/t/status.json", "runs/mine/job.yaml"):
        Path(file).write_text(JOB + ("local: {run: '1'}\n" if "status" in file else ""))
    code, out, err = checked(capsys, ".")
    assert (code, err) == (0, "")
    assert out == "job.yaml: ddpjob t is valid\nruns/mine/job.yaml: ddpjob t is valid\n"
    assert checked(capsys, "runs/t/1") == (0, "runs/t/1/job.json: ddpjob t is valid\n", ""), (
        "a file that is named explicitly is read"
    )


def test_a_folder_without_manifests_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = checked(capsys, str(tmp_path))
    assert code == 2 and "no DDPJob found in its manifest files" in err
    code, _, err = checked(capsys, "https://example.com/job.yaml")
    assert code == 2 and "curl -fsSL https://example.com/job.yaml | ddpjob" in err
    code, _, err = checked(capsys)
    assert code == 2 and "specify a FILE" in err


def test_standard_input_that_is_not_utf_8_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["validate", "-"], ["submit", "--dry-run", "--cluster", "-"], ["run", "-"], ["convert", "-"]):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(JOB.encode() + b"# \xff\n"), encoding="utf-8"))
        assert main(words) == 2
        assert "not UTF-8" in capsys.readouterr().err
    utf8 = io.BytesIO(b"\xef\xbb\xbf" + JOB.replace("b.py", "b.py\r\n  args: [über]").encode())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(utf8, encoding="latin-1"))
    assert main(["submit", "--dry-run", "--cluster", "-"]) == 0
    assert "über" in capsys.readouterr().out, "a manifest is UTF-8 regardless of the terminal's encoding"

"""The operator's and CLI's parsers for coordinators' reports, tenants' jobs and users' files.

Each `make` imports what it calls, so that a process pays only for its own parser.
"""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from benchmarks import CHECKOUT
from benchmarks.fuzz.mutate import Form
from benchmarks.fuzz.watch import Parser, Target, scratch

NOW = datetime(2026, 1, 1, tzinfo=UTC)
_TIME = "2026-01-01T00:00:00.000Z"
INCIDENT = {
    "id": 1, "time": _TIME, "kind": "WorkerFailed", "pod": "a-0-0", "index": 0, "rank": 0, "localRank": 0,
    "exitCode": 1, "signal": None, "message": "KeyError: 'x'", "traceback": "Traceback", "consequences": 1,
    "backoffSeconds": 0,
}  # fmt: skip
PROGRESS = {
    "epoch": 1, "step": 3, "steps": 9, "loss": 0.5, "metrics": {"a": 1.0}, "eta": 3, "samplesPerSecond": 3.0,
    "stragglers": [{"rank": 1, "slowdown": 2}], "updatedAt": _TIME,
}  # fmt: skip
REPORT = {
    "generation": 0, "state": "Running", "nodes": 2, "minNodes": 2, "backoff": [1.0, 60.0], "now": _TIME,
    "news": 2, "mode": "Fast", "attempt": 0, "hangAfter": None, "world": 2, "round": 1,
    "members": [{"pod": "a-0-0", "state": "Running", "index": 0, "attempt": 0, "rank": 0, "round": 1}],
    "lost": [{"pod": "a-1-0", "since": _TIME, "index": 1, "why": "x"}],
    "notes": [{"pod": "a", "kind": "Data", "why": "w"}], "backoffUntil": _TIME, "incidents": [INCIDENT],
    "progress": PROGRESS, "recovery": {"lastSeconds": 1.0, "downSince": _TIME}, "order": "",
    "overdue": {"since": _TIME, "where": "w", "traceback": "t", "activity": "a"},
}  # fmt: skip
KUBEFLOW = b"""apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: a, labels: {team: vision}}
spec:
  nprocPerNode: "8"
  elasticPolicy: {minReplicas: 2, maxReplicas: 8, maxRestarts: 3, rdzvBackend: c10d}
  runPolicy: {backoffLimit: 3, cleanPodPolicy: None, ttlSecondsAfterFinished: 60}
  pytorchReplicaSpecs:
    Master: {replicas: 1, restartPolicy: OnFailure, template: {spec: {containers: [{name: pytorch, image: i}]}}}
    Worker:
      replicas: 2
      template:
        spec:
          volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 16Gi}}]
          containers:
            - name: pytorch
              image: i
              command: [sh, -c, 'torchrun --nnodes=2:8 --nproc_per_node 8 train.py --lr 0.1']
              env: [{name: A, value: b}]
              resources: {limits: {nvidia.com/gpu: 8, memory: 64Gi}, requests: {cpu: 8}}
---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: tune}
spec:
  runtimeRef: {name: torch-distributed}
  trainer:
    image: i
    numNodes: 3
    numProcPerNode: 4
    command: [python, -u, -m, my.train]
    resourcesPerNode: {limits: {nvidia.com/gpu: 4}}
"""


def as_json(value: Any) -> bytes:
    """Return a seed as JSON, or check that a result can be written as strict JSON."""
    return json.dumps(value, allow_nan=False).encode()


def loads(data: bytes) -> Any:
    """Parse JSON. Raises ValueError."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _manifest_files() -> list[bytes]:
    files = [*(CHECKOUT / "examples").glob("*.yaml"), *(CHECKOUT / "tests/corpus/valid").glob("*.yaml")]
    return [file.read_bytes() for file in sorted(files)]


def _jobs() -> list[dict[str, Any]]:
    """Return the DDPJobs in all good manifests, in the form stored by the API server."""
    from ddpjob.api.reader import read_manifests

    made = []
    for text in _manifest_files():
        for manifest in read_manifests(text.decode()):
            body = manifest.checked()
            body["metadata"] |= {"namespace": "space", "uid": "uid"}
            made.append(body)
    return made


def _reports() -> Target:
    from ddpjob.engine.coordinator_client import read_report

    def read(data: bytes) -> None:
        as_json(read_report(data, NOW, 2).write())

    return Target(read, [as_json(REPORT)], (ValueError,))


def _decisions() -> Target:
    """Fuzz the operator's decision on a report, and its next decision, which starts from the
    resulting status.
    """
    from ddpjob.api.job import DDPJob
    from ddpjob.api.job_status import SlotState
    from ddpjob.core.decide import decide
    from ddpjob.core.world import ContainerView, PodView, Role, World
    from ddpjob.engine.coordinator_client import read_report

    started = NOW - timedelta(seconds=60)
    pods = tuple(
        PodView(
            name=f"a-{i}-0", uid=f"{i}", role=Role.NODE, index=i, host=f"n{i}", phase="Running", created=started,
            containers={"trainer": ContainerView(started=started)},
        )
        for i in range(2)
    )  # fmt: skip
    world = World(pods=pods, runtime="r", runtime_offered="r")
    spec = {"image": "image", "script": "train.py", "nodes": 2, "recovery": {"mode": "Fast"}}
    job = DDPJob.read({"metadata": {"name": "a", "namespace": "space", "uid": "uid"}, "spec": spec})
    status = decide(job, world, NOW).status
    status = replace(status, rendezvous=replace(status.rendezvous, endpoint="10.0.0.1:29401", state=SlotState.RUNNING))
    job = replace(job, status=status)

    def read(data: bytes) -> None:
        seen = replace(world, report=read_report(data, NOW, 2))
        first = decide(job, seen, NOW)
        assert len(as_json(first.status.write(job.spec))) < 500_000, "the API server does not accept a larger status"
        decide(replace(job, status=first.status), seen, NOW + timedelta(seconds=1))

    return Target(read, [as_json(REPORT)], (ValueError,))


def _stored_jobs() -> Target:
    """Fuzz a job admitted by the API server's schema, up to its pods."""
    from ddpjob.api.job import DDPJob
    from ddpjob.api.reader import validate
    from ddpjob.core.decide import decide
    from ddpjob.core.world import World
    from ddpjob.objects.platform import Platform
    from ddpjob.objects.pod_template import problems
    from ddpjob.objects.pods import build_coordinator, build_node

    platform, world = Platform(operator_key=b"0123456789abcdef"), World(runtime="r", runtime_offered="r")

    def read(data: bytes) -> None:
        body = loads(data)
        if not isinstance(body, dict) or validate(body) or not body["metadata"].get("uid"):
            raise ValueError("the API server would not store this object")
        job = DDPJob.read(body)
        status = decide(job, world, NOW).status
        as_json(status.write(job.spec))
        if not status.terminal and status.slots and not problems(job.spec.pod_template or {}):
            as_json(build_node(job, status, platform, 0, 0))
            as_json(build_coordinator(job, status, platform))

    return Target(read, [as_json(job) for job in _jobs()], (ValueError,))


def _classes() -> Target:
    """Fuzz a platform team's class, with a tenant's job of that class."""
    from ddpjob.api.job import DDPJob
    from ddpjob.api.job_classes import JobClasses
    from ddpjob.api.reader import validate

    spec = {
        "image": "i", "env": [{"name": "A", "value": "b"}], "resources": {"requests": {"cpu": 8}},
        "podTemplate": {"spec": {"nodeSelector": {"gpu": "a100"}}},
    }  # fmt: skip
    given = {"namespaces": ["*"], "spec": spec, "fixed": ["env"]}
    given["limits"] = {"maxNodes": 4, "maxGpusPerNode": 8, "images": ["i", "registry.example/*"]}
    few = [job for job in _jobs() if "command" not in job["spec"]][::8]
    jobs = [{**job, "spec": {**job["spec"], "className": "c"}} for job in few]

    def read(data: bytes) -> None:
        body = loads(data)
        if not isinstance(body, dict) or not isinstance(body.get("classes"), dict):
            raise ValueError("no classes")
        classes = JobClasses.read(body["classes"])
        job = body.get("job")
        if not isinstance(job, dict) or validate(job) or not job["metadata"].get("uid"):
            raise ValueError("the API server would not store this object")
        classes.offer(DDPJob.read(job))

    return Target(read, [as_json({"classes": {"c": given}, "job": job}) for job in jobs], (ValueError,))


def _manifests() -> Target:
    """Fuzz a manifest through `ddpjob validate`."""
    from ddpjob.api.reader import ManifestError, read_manifests
    from ddpjob.client.backends.backend import Mistake
    from ddpjob.client.manifests.manifest_sources import checked

    def read(data: bytes) -> None:
        for manifest in read_manifests(data.decode(errors="replace")):
            checked(manifest)

    return Target(read, _manifest_files(), (ManifestError, Mistake))


def _manifests_as_json() -> Target:
    """Fuzz a manifest by changing parts of the parsed document, not its words, so that more inputs
    are valid.
    """
    return replace(_manifests(), seeds=[as_json(job) for job in _jobs()])


def _conversions() -> Target:
    """Fuzz another operator's manifest through `ddpjob convert`."""
    from ddpjob.api.yamltext import YamlError, read_documents, write_document
    from ddpjob.client.backends.backend import Mistake
    from ddpjob.client.manifests.convert_jobs import convert

    def read(data: bytes) -> None:
        for document in read_documents(data.decode(errors="replace")):
            if isinstance(document.value, dict):
                write_document(convert(document.value).job)

    parts = [as_json(document.value) for document in read_documents(KUBEFLOW.decode())]
    return Target(read, parts, (YamlError, Mistake))


def _metrics() -> Target:
    from ddpjob.client.texts.metric_series import AXES, read_metrics

    rows = [
        {"event": "start", "step": 0, "time": 1.5},
        {"event": "step", "step": 1, "loss": 0.5, "samplesPerSecond": 3, "time": 2.5, "epoch": 1},
        {"event": "step", "step": 2, "loss": None}, {"event": "eval", "step": 2, "accuracy": 0.5, "loss": 1e5},
    ]  # fmt: skip

    def draw(data: bytes) -> None:
        series = read_metrics(data.decode(errors="replace"))
        series.after_last_loss()
        for where in map(series.positions, AXES):
            series.restarts_at(where)
            for curve in (*series.steps.values(), *series.evaluations.values()):
                series.stretches(curve, where)

    return Target(draw, [b"\n".join(map(as_json, rows))], ())


def _ends() -> Target:
    """Fuzz a container's termination message, from a launcher or from a rank in a `command`."""
    from ddpjob.core.failures.classify import explain_end
    from ddpjob.core.world import ContainerView, PodView, Role

    rank = {"kind": "RankFailed", "rank": 3, "exitCode": 1, "init": False, "restart": 0, "message": "KeyError: 'x'",
        "traceback": "Traceback"}  # fmt: skip
    table = "Root Cause (first observed failure):\n[0]:\n  rank  : 5 (local_rank: 1)\n  exitcode  : -11 (pid: 77)\n"

    def read(data: bytes) -> None:
        text = data.decode(errors="replace")[:4096]
        container = ContainerView(exit_code=1, reason="Error", message=text)
        pod = PodView(name="a-0-0", uid="u", role=Role.NODE, containers={"trainer": container})
        for launcher in (True, False):
            explain_end(pod, launcher=launcher)

    return Target(read, [json.dumps(rank).encode(), json.dumps(table).encode(), table.encode()], ())


def _rounds() -> Target:
    """Fuzz a job's record of rounds, as `ddpjob show` and `ddpjob get --local` read it."""
    from ddpjob.client.backends.backend import Mistake
    from ddpjob.client.backends.left_behind import describe_left_behind, read_left_behind
    from ddpjob.client.backends.past_jobs import PastJobs
    from ddpjob_runtime.protocol import ROUNDS_FILE

    folder = scratch("rounds")
    base = {"time": _TIME, "job": "a", "namespace": "n", "uid": "u", "generation": "0", "round": 1}
    rows = [
        {**base, "event": "round", "world": 2, "incidents": [], "progress": {}},
        {**base, "event": "round", "round": 2, "world": 2, "incidents": [INCIDENT], "progress": PROGRESS},
        {**base, "event": "end", "ok": True, "why": "done", "incidents": [], "progress": {}},
    ]

    def read(data: bytes) -> None:
        (folder / ROUNDS_FILE).write_bytes(data)
        list(describe_left_behind(read_left_behind(folder)))
        past = PastJobs(folder)
        for job in past.jobs():
            as_json(job)
            past.events(job["metadata"]["name"])

    return Target(read, [b"\n".join(map(as_json, rows))], (Mistake,))


def _kept_logs() -> Target:
    """Fuzz the list of kept logs that a pod prints, up to the pods that `ddpjob logs` shows."""
    from ddpjob.client.backends.kept_logs import KeptLogs, parse_listing

    rows = [[f"a-{index}-0.0123abcd.log{end}", 100] for index in (0, 1) for end in ("", ".1")]

    def read(data: bytes) -> None:
        KeptLogs("a", "0123abcd", parse_listing(data.decode(errors="replace")), lambda name: b"").pods()

    return Target(read, [as_json(rows)], ())


PARSERS = (
    Parser("reports", "a coordinator's report, read by the operator", Form.JSON, _reports),
    Parser("decisions", "such a report, and the job's status derived from it", Form.JSON, _decisions),
    Parser("jobs", "a DDPJob that the schema admits, and its pods", Form.JSON, _stored_jobs),
    Parser("classes", "a job class, and a job that uses it", Form.JSON, _classes),
    Parser("manifests", "a manifest (YAML), read as by `ddpjob validate`", Form.TEXT, _manifests),
    Parser("manifests-json", "the same as JSON", Form.JSON, _manifests_as_json),
    Parser("conversions", "PyTorchJob and TrainJob", Form.JSON, _conversions),
    Parser("metrics", "metrics.jsonl", Form.LINES, _metrics),
    Parser("rounds", "the record of rounds in a checkpoint folder", Form.LINES, _rounds),
    Parser("kept-logs", "the list of kept logs that a pod prints", Form.JSON, _kept_logs),
    Parser("ends", "a container's termination message", Form.JSON, _ends),
)

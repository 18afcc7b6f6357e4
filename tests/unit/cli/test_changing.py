"""Commands that change a job, even if it finishes or its cluster becomes unreachable in the
meantime.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ddpjob.cli import changing, looking
from ddpjob.cli.main import main
from ddpjob.cli.output import document, printable
from ddpjob.cli.places import Place
from ddpjob.client import restart_jobs
from ddpjob.client.backends.api_server import ApiRefusal
from ddpjob.client.backends.backend import Happened, Mistake, NoAnswer, NoSuchJob, PodLine
from ddpjob.client.backends.cluster_backend import ClusterBackend
from ddpjob.client.job_client import Client

AWAY, GONE = NoAnswer("the API server does not answer"), NoSuchJob("no job j")


class OneJob:
    """A backend with the job j. Reads return `phases` in turn, and repeat the last one."""

    where = "here"
    notes: tuple[str, ...] = ()

    def __init__(self, *phases: str | BaseException) -> None:
        self.phases, self.patches = list(phases), list[dict[str, Any]]()

    def job(self, name: str) -> dict[str, Any]:
        phase = self.phases.pop(0) if len(self.phases) > 1 else self.phases[0]
        if isinstance(phase, BaseException):
            raise phase
        return {"metadata": {"name": name}, "status": {"phase": phase}}

    def pods(self, name: str) -> list[PodLine]:
        return []

    def patch(self, name: str, spec: dict[str, Any]) -> None:
        self.patches.append(spec)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: None)
    monkeypatch.setattr(changing, "time", fast)
    monkeypatch.setattr(restart_jobs, "time", fast)


def suspends(backend: OneJob) -> list[bool]:
    return [spec["runPolicy"]["suspend"] for spec in backend.patches]


def called(monkeypatch: pytest.MonkeyPatch, backend: OneJob, *words: str) -> int:
    monkeypatch.setattr(Place, "backend", lambda place, **options: backend)
    return main(words)


@pytest.mark.parametrize("phase", ["Complete", "Failed"])
@pytest.mark.parametrize("words", [("suspend", "j"), ("resume", "j"), ("scale", "j", "3"), ("restart", "j")])
def test_commands_refuse_to_change_a_finished_job(
    words: tuple[str, ...], phase: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = OneJob(phase)
    assert called(monkeypatch, backend, *words) == 2 and not backend.patches
    assert f"j is {phase} and cannot be changed; run `ddpjob rerun j` to start it again" in capsys.readouterr().err


def test_the_python_client_also_refuses_to_change_a_finished_job() -> None:
    backend = OneJob("Complete")
    client = Client(backend)  # type: ignore[arg-type]
    for change in (lambda: client.scale("j", 3), lambda: client.suspend("j"), lambda: client.resume("j")):
        with pytest.raises(Mistake, match="ddpjob rerun"):
            change()
    assert not backend.patches


class Unattended(OneJob):
    """A job in a cluster whose operator never acts on changes, or only after a few reads."""

    def __init__(self, acts: bool) -> None:
        super().__init__("Running")
        self.acts, self.looks = acts, 0

    def job(self, name: str) -> dict[str, Any]:
        self.looks += 1
        seen = len(self.patches) if self.acts and self.looks > 4 else 0
        return {"metadata": {"name": name, "generation": len(self.patches)},
                "status": {"phase": "Running", "observedGeneration": seen}}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "done", "asked"),
    [
        (("suspend", "j"), "j suspended; ", "j not yet suspended; "),
        (("resume", "j"), "j resumed", "j not yet resumed"),
        (("scale", "j", "3"), "j scaled to 3 nodes", "j not yet scaled to 3 nodes"),
    ],
)
def test_a_change_that_no_operator_has_applied_is_reported_as_only_requested(
    words: tuple[str, ...], done: str, asked: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: `ddpjob suspend` printed "suspended" while the pods still ran, because the
    operator was gone.
    """
    monkeypatch.setattr(changing, "ACT_SECONDS", 0.05)
    assert called(monkeypatch, Unattended(acts=False), *words) == 0
    said = capsys.readouterr()
    assert asked in said.out and "no operator has acted on j within" in said.err
    monkeypatch.setattr(changing, "ACT_SECONDS", 60.0)
    assert called(monkeypatch, Unattended(acts=True), *words) == 0
    assert done in (said := capsys.readouterr()).out and not said.err


def test_a_restart_by_a_user_who_may_not_list_pods_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the refused restart left the job suspended, although exit code 2 means that
    nothing was changed.
    """
    backend = OneJob("Running")

    def refuse(name: str) -> list[PodLine]:
        raise ApiRefusal(403, "Forbidden", "you may not list pods")

    monkeypatch.setattr(backend, "pods", refuse)
    assert called(monkeypatch, backend, "restart", "j") == 2 and not backend.patches


def test_a_restart_continues_after_an_outage_of_the_api_server(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = OneJob("Running", "Running", AWAY, AWAY, "Suspended")
    assert called(monkeypatch, backend, "restart", "j") == 0
    assert suspends(backend) == [True, False]


@pytest.mark.parametrize("failure", [Mistake("not allowed"), KeyboardInterrupt()])
def test_an_interrupted_restart_reports_that_the_job_is_suspended(
    failure: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = OneJob("Running", "Running", failure)
    assert called(monkeypatch, backend, "restart", "j") in (2, 130)
    assert "j is suspended; run `ddpjob resume j` to continue it" in capsys.readouterr().err
    assert suspends(backend) == [True]


@pytest.mark.parametrize(
    ("meanwhile", "said"), [("Complete", "j is Complete"), ("Interrupted", "j is Interrupted"), (GONE, "no job j")]
)
def test_a_restart_reports_a_job_that_ends_in_the_meantime(
    meanwhile: str | BaseException, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = OneJob("Running", meanwhile)
    assert called(monkeypatch, backend, "restart", "j", "--timeout", "1") == 2
    err = capsys.readouterr().err
    assert said in err and "resume" not in err and suspends(backend) == [True]


def test_strings_in_a_job_cannot_control_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b]0;owned\x07\x9b31m\u202eé"
    failed = {"type": "Failed", "status": "True", "reason": "WorkerFailed", "message": f"a {evil}\n\tb",
              "lastTransitionTime": "2026-01-01T00:00:00Z"}  # fmt: skip
    body = {"metadata": {"name": "j", "uid": "1"}, "spec": {"image": "a", "script": f"x{evil}"},
            "status": {"phase": "Failed", "conditions": [failed], "progress": {"display": evil}}}  # fmt: skip
    backend = OneJob("Failed")
    monkeypatch.setattr(backend, "job", lambda name: body)
    monkeypatch.setattr(backend, "jobs", lambda: [body], raising=False)
    monkeypatch.setattr(backend, "changes", lambda name, seconds=None: iter([(body, False)]), raising=False)
    monkeypatch.setattr(backend, "events", lambda name: [Happened(None, True, "R", f"e{evil}")], raising=False)
    for words in (("describe", "j"), ("why", "j"), ("events", "j"), ("get",), ("get", "-w"), ("wait", "j")):
        called(monkeypatch, backend, *words)
        out, err = capsys.readouterr()
        printed = out + err
        assert "]0;owned31mé" in printed and not set(printed) & set("\x1b\x07\x9b\u202e"), words


def test_no_job_is_deleted_unless_all_named_jobs_exist(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Jobs(OneJob):
        deleted: tuple[str, ...] = ()

        def job(self, name: str) -> dict[str, Any]:
            if name == "j":
                raise GONE
            return super().job(name)

        def delete(self, name: str) -> None:
            self.deleted += (name,)

    backend = Jobs("Running")
    assert called(monkeypatch, backend, "delete", "a", "b", "a") == 0
    assert backend.deleted == ("a", "b")
    assert capsys.readouterr().out.splitlines() == ["ddpjob a deleted (here)", "ddpjob b deleted (here)"]
    assert called(monkeypatch, backend, "delete", "c", "j") == 2
    assert backend.deleted == ("a", "b") and "no job j" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("checkpoints", "said"),
    [
        (
            {"claimName": "c"},
            "; the next run with this name resumes from the checkpoints in the claim c, which is kept",
        ),
        ({"url": "s3://b/j"}, "; the next run with this name resumes from the checkpoints in s3://b/j, which is kept"),
        (
            {"nfs": {"server": "s", "path": "/p"}},
            "; the next run with this name resumes from the checkpoints in s:/p, which is kept",
        ),
        ({"claimTemplate": {"whenDeleted": "Delete"}}, ""),
        ({}, ""),
    ],
)
def test_delete_reports_which_checkpoints_are_kept(
    checkpoints: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stored(OneJob):
        def job(self, name: str) -> dict[str, Any]:
            return {**super().job(name), "spec": {"storage": {"checkpoints": checkpoints}}}

        def delete(self, name: str) -> None:
            pass

    assert called(monkeypatch, Stored("Complete"), "delete", "j") == 0
    assert capsys.readouterr().out == f"ddpjob j deleted{said} (here)\n"


def test_job_names_are_accepted_in_the_form_in_which_they_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`ddpjob delete $(ddpjob get -o name)` works, as with kubectl."""
    backend = OneJob("Running")
    assert called(monkeypatch, backend, "get", "ddpjob.ddpjob.io/j", "-o", "name") == 0
    assert called(monkeypatch, backend, "scale", capsys.readouterr().out.strip(), "3") == 0
    assert called(monkeypatch, backend, "get", "ddp/j", "-o", "name") == 0
    assert called(monkeypatch, backend, "get", "ddp", "j", "-o", "name") == 0
    assert capsys.readouterr().out.endswith("ddpjob.ddpjob.io/j\n" * 2)
    deleted: list[str] = []
    monkeypatch.setattr(OneJob, "delete", lambda backend, name: deleted.append(name), raising=False)
    assert called(monkeypatch, backend, "delete", "ddpjob.ddpjob.io/j", "k") == 0
    assert deleted == ["j", "k"]
    assert called(monkeypatch, backend, "delete", "ddp", "j", "k") == 0
    assert deleted == ["j", "k", "j", "k"]
    capsys.readouterr()
    assert called(monkeypatch, backend, "scale", "ddp", "j", "3") == 0
    assert capsys.readouterr().out.startswith("ddpjob j ")


def test_a_job_named_like_a_kind_can_be_addressed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A single argument is always the name of a job."""
    deleted: list[str] = []
    monkeypatch.setattr(OneJob, "delete", lambda backend, name: deleted.append(name), raising=False)
    assert called(monkeypatch, OneJob("Running"), "delete", "ddp") == 0
    assert called(monkeypatch, OneJob("Running"), "scale", "ddp", "3") == 0
    assert deleted == ["ddp"] and "ddpjob ddp " in capsys.readouterr().out


def test_a_name_is_refused_together_with_all_namespaces(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: one namespace was searched, and the error said that no namespace has the job."""
    assert called(monkeypatch, OneJob("Running"), "get", "-A", "j") == 2
    assert "-A lists the jobs in all namespaces; for a single job, specify" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("describe", "j"), ("why", "j")])
def test_a_user_who_may_only_read_jobs_sees_their_status(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dashboard's page does the same."""
    failed = {"type": "Failed", "status": "True", "reason": "WorkerFailed", "message": "rank 1 ended: ValueError",
              "lastTransitionTime": "2026-01-01T00:00:00Z"}  # fmt: skip
    body = {"metadata": {"name": "j", "uid": "1"}, "spec": {"image": "a", "script": "x"},
            "status": {"phase": "Failed", "conditions": [failed]}}  # fmt: skip

    def forbidden(name: str) -> Any:
        raise ApiRefusal(403, "Forbidden", "User may not list it")

    backend = OneJob("Failed")
    monkeypatch.setattr(backend, "job", lambda name: body)
    monkeypatch.setattr(backend, "pods", forbidden)
    monkeypatch.setattr(backend, "events", forbidden, raising=False)
    assert called(monkeypatch, backend, *words) == (words[0] == "why")
    out, err = capsys.readouterr()
    assert "rank 1 ended: ValueError" in out and "User may not list it" in err
    assert "rank 1 ended: ValueError" in Client(backend).why("j")  # type: ignore[arg-type]


def test_logs_report_a_missing_job_to_a_user_who_may_not_list_jobs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forbidden() -> Any:
        raise ApiRefusal(403, "Forbidden", "User may not list it")

    backend = OneJob(GONE)
    monkeypatch.setattr(backend, "jobs", forbidden, raising=False)
    assert called(monkeypatch, backend, "logs", "j") == 2
    assert capsys.readouterr().err == "no job j\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--since", "0"), "--since 0: write a duration"),
        (("--index", "1"), "j-0-0 is a pod; --index chooses pods of a job"),
    ],
)
def test_logs_refuses_an_option_that_would_have_no_effect(
    words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(looking, "_job_or_pod", lambda backend, name: ({"metadata": {"name": "j"}}, name, False))
    assert called(monkeypatch, OneJob("Running"), "logs", "j-0-0", *words) == 2
    assert said in capsys.readouterr().err


def test_a_previous_log_is_not_followed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: a missing previous log was requested every second, silently."""
    assert called(monkeypatch, OneJob("Running"), "logs", "j", "-f", "--previous") == 2
    assert "--previous: " in capsys.readouterr().err


HOSTILE = "\x1b]52;c;cm0=\x07\x1b[2J\x9b31m\u202etext"


def test_stacks_of_a_pod_cannot_control_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pod = PodLine("j-0-0", "node", 0, "Running")
    backend = SimpleNamespace(job=lambda job: {}, pods=lambda job: [pod], run_in=lambda pod, code: f"rank 0\n{HOSTILE}")
    assert called(monkeypatch, backend, "stacks", "j") == 0  # type: ignore[arg-type]
    assert capsys.readouterr().out == "--- pod j-0-0\nrank 0\n]52;c;cm0=[2J31mtext\n"


def test_json_of_an_object_cannot_control_the_terminal() -> None:
    """JSON escapes only control characters below 32, but a terminal treats U+009B like ESC [."""
    written = document({"a": HOSTILE + "größe"}, "json")
    assert json.loads(written) == {"a": HOSTILE + "größe"} and "größe" in written
    assert printable(written) == written, "the output contains no control characters"


def test_a_manifest_that_run_refuses_cannot_control_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text('apiVersion: ddpjob.io/v1alpha1\nkind: DDPJob\nmetadata: {name: a}\nspec: {"fi\\e[31m": 1}\n')
    assert main(["run", str(path)]) == 2
    printed = capsys.readouterr().err
    assert "fi[31m" in printed and "\x1b" not in printed


class Ended(ClusterBackend):
    """A cluster with the finished job j, which owns the ConfigMap with its script."""

    where = "here"  # type: ignore[assignment]

    def __init__(self) -> None:
        self.done = list[Any]()
        self.there = True
        self.namespace, self.notes = "ml", []

    @property
    def api(self) -> Ended:  # type: ignore[override]
        return self

    def path(self, plural: str, name: str = "", below: str = "") -> str:
        return f"{plural}/{name}"

    def existing(self, path: str) -> dict[str, Any] | None:
        owner = {"uid": "u" if path.endswith("/mine") else "other"}
        return {"metadata": {"name": path.rpartition("/")[2], "ownerReferences": [owner]}, "data": {"a.py": "1"}}

    def job(self, name: str) -> dict[str, Any]:
        if not self.there:
            raise GONE
        volumes = [{"name": name, "configMap": {"name": name}} for name in ("mine", "shared")]
        meta = {"name": name, "uid": "u", "resourceVersion": "7", "labels": {"a": "b"}, "annotations": {LAST: "{}"}}
        spec = {"nodes": 2, "podTemplate": {"spec": {"volumes": volumes}}}
        return {"apiVersion": "v", "kind": "DDPJob", "metadata": meta, "spec": spec, "status": {"phase": "Failed"}}

    def dry_run(self, plural: str, body: dict[str, Any]) -> dict[str, Any]:
        raise ApiRefusal(409, "AlreadyExists", "already exists")

    def delete(self, name: str) -> None:
        self.done.append("delete")
        self.there = False

    def create(self, manifests: list[dict[str, Any]]) -> str:
        self.done.append(manifests)
        return "j"


LAST = "kubectl.kubernetes.io/last-applied-configuration"


def test_on_a_cluster_a_rerun_deletes_the_job_and_creates_it_with_its_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = Ended()
    assert called(monkeypatch, backend, "rerun", "j") == 0  # type: ignore[arg-type]
    deleted, (code, job) = backend.done
    assert deleted == "delete" and job["metadata"] == {"name": "j", "labels": {"a": "b"}} and "status" not in job
    assert (code["kind"], code["metadata"], code["data"]) == ("ConfigMap", {"name": "mine"}, {"a.py": "1"})
    assert "j created again (it was Failed)" in capsys.readouterr().out


@pytest.mark.parametrize("refused", ["existing", "dry_run"])
def test_a_rerun_deletes_nothing_if_the_user_may_not_read_or_create_the_code(
    refused: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: the job was deleted and created again without its code."""

    def refuse(*_: object) -> None:
        raise ApiRefusal(403, "Forbidden", 'User "x" cannot get resource "configmaps"')

    backend = Ended()
    monkeypatch.setattr(backend, refused, refuse)
    assert called(monkeypatch, backend, "rerun", "j") == 2  # type: ignore[arg-type]
    assert backend.done == []
    assert 'j was neither deleted nor created again: User "x" cannot get' in capsys.readouterr().err


def test_a_full_quota_does_not_prevent_a_rerun(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ApiRefusal(403, "Forbidden", "j is forbidden: exceeded quota: jobs")

    backend = Ended()
    monkeypatch.setattr(backend, "dry_run", refuse)
    assert called(monkeypatch, backend, "rerun", "j") == 0  # type: ignore[arg-type]


class EndedWith(Ended):
    """A failed job with this spec."""

    def __init__(self, uid: str = "1c2d3e4f-1111", **spec: Any) -> None:
        super().__init__()
        self.uid, self.spec = uid, {"image": "a", "module": "m", **spec}

    def job(self, name: str) -> dict[str, Any]:
        if not self.there:
            raise GONE
        meta = {"name": name, "namespace": "n", "uid": self.uid}
        return {"apiVersion": "ddpjob.io/v1alpha1", "kind": "DDPJob", "metadata": meta, "spec": self.spec,
                "status": {"phase": "Failed"}}  # fmt: skip


@pytest.mark.parametrize(
    ("checkpoints", "field", "value"),
    [
        ({"claimName": "c"}, "subPath", "j-after-1c2d3e4f"),
        ({"hostPath": "/data", "subPath": "."}, "subPath", "j-after-1c2d3e4f"),
        ({"nfs": {"server": "s", "path": "/"}, "subPath": "a/j-after-00000000"}, "subPath", "a/j-after-1c2d3e4f"),
        ({"url": "s3://bucket/f/"}, "url", "s3://bucket/f/after-1c2d3e4f"),
        ({"url": "s3://bucket/f/after-00000000"}, "url", "s3://bucket/f/after-1c2d3e4f"),
    ],
)
def test_a_fresh_rerun_gets_a_checkpoint_folder_that_no_job_has_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], checkpoints: Any, field: str, value: str
) -> None:
    backend = EndedWith(storage={"checkpoints": checkpoints, "sharedMemory": "1Gi"})
    assert called(monkeypatch, backend, "rerun", "j", "--fresh") == 0, capsys.readouterr().err  # type: ignore[arg-type]
    (job,) = backend.done[1]
    assert job["spec"]["storage"] == {"checkpoints": {**checkpoints, field: value}, "sharedMemory": "1Gi"}
    said = capsys.readouterr().out
    assert f"storage.checkpoints.{field} is now {value}, and the old checkpoints are kept" in said


def test_a_fresh_rerun_without_a_volume_needs_no_new_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = EndedWith()
    assert called(monkeypatch, backend, "rerun", "j", "--fresh") == 0  # type: ignore[arg-type]
    assert backend.done[1][0]["spec"] == backend.spec


def test_a_rerun_that_would_delete_the_checkpoints_needs_fresh(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: the message said that the job resumes from its last checkpoint."""
    storage = {"checkpoints": {"claimTemplate": {"whenDeleted": "Delete", "spec": {}}}}
    backend = EndedWith(storage=storage)
    assert called(monkeypatch, backend, "rerun", "j") == 2  # type: ignore[arg-type]
    assert backend.done == [] and "whenDeleted is Delete; run `ddpjob rerun j --fresh`" in capsys.readouterr().err
    assert called(monkeypatch, backend, "rerun", "j", "--fresh") == 0  # type: ignore[arg-type]
    assert backend.done[1][0]["spec"]["storage"] == storage
    assert "it starts from scratch, because its checkpoints were deleted" in capsys.readouterr().out


MOUNTED = {
    "spec": {"containers": [{"name": "trainer", "volumeMounts": [{"name": "v", "mountPath": "/checkpoints/a"}]}]}
}


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"className": "c"}, "set by the job's class or podTemplate"),
        ({"podTemplate": MOUNTED}, "set by the job's class or podTemplate"),
        ({"storage": {"checkpoints": {"claimName": "c", "readOnly": True}}}, "readOnly is set"),
        ({"storage": {"checkpoints": {"url": f"s3://bucket/{'f' * 490}"}}}, "--fresh: spec.storage.checkpoints.url"),
    ],
)
def test_a_fresh_rerun_deletes_nothing_if_the_folder_cannot_change(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], spec: Any, why: str
) -> None:
    backend = EndedWith(**spec)
    assert called(monkeypatch, backend, "rerun", "j", "--fresh") == 2  # type: ignore[arg-type]
    assert backend.done == [] and why in capsys.readouterr().err


def test_rerun_refuses_an_unfinished_job(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert called(monkeypatch, OneJob("Running"), "rerun", "j") == 2
    assert "j is Running and has not ended; run `ddpjob restart j` to replace" in capsys.readouterr().err


def test_the_pod_of_a_rank_is_printed_as_an_argument_for_kubectl(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class TwoPods(OneJob):
        def job(self, name: str) -> dict[str, Any]:
            return {"metadata": {"name": name}, "spec": {"nodes": 2, "gpusPerNode": 4}, "status": {}}

        def pods(self, name: str) -> list[PodLine]:
            return [PodLine(f"j-{at}-{at}", "node", at, "Running") for at in range(2)]

    for rank, found in (("0", "j-0-0"), ("3", "j-0-0"), ("4", "j-1-1")):
        assert called(monkeypatch, TwoPods("Running"), "pod", "j", "--rank", rank) == 0
        assert capsys.readouterr().out == f"{found}\n"
    assert called(monkeypatch, TwoPods("Running"), "pod", "j", "--rank", "8") == 2
    assert capsys.readouterr().err == "j has no rank 8; the ranks are 0 to 7\n"

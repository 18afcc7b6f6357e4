"""`Client` behaves the same on a cluster and on this machine, from the creation of a job to its
logs.
"""

from __future__ import annotations

import copy
import json
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from ddpjob import Client, Job, JobFailed, Mistake, Progress
from ddpjob.client.backends.backend import LogOptions, PodLine
from ddpjob.client.job_html import MetricCurve
from ddpjob.client.manifests.build_manifest import CODE_FOLDER, MOST_BYTES

Json = dict[str, Any]


def job(name: str = "j", phase: str = "Running", **status: Any) -> Json:
    """Return a job as a backend stores it."""
    from ddpjob.api.reader import with_defaults

    meta = {"name": name, "uid": "1"}
    body = {
        "apiVersion": "ddpjob.io/v1alpha1",
        "kind": "DDPJob",
        "metadata": meta,
        "spec": {"image": "a", "module": "m"},
    }
    return with_defaults(body) | {"status": {"phase": phase, **status}}


class Place:
    """A backend of either kind. It keeps created objects, and shows the states of the job j in
    turn.
    """

    where, notes = "here", ()

    def __init__(self, local: bool, *states: tuple[Json, bool]) -> None:
        self.local, self.created, self.states, self.killed = local, list[Json](), states, list[str]()

    def create(self, manifests: list[Json]) -> str:
        self.created = manifests
        return str(manifests[-1]["metadata"]["name"])

    def job(self, name: str) -> Json:
        return self.created[-1] if self.created else self.states[-1][0]

    def changes(self, name: str, seconds: float | None = None) -> Iterator[tuple[Json, bool]]:
        return iter(self.states)

    def pods(self, name: str) -> list[PodLine]:
        return [PodLine(f"j-{index}-0", "node", index, "Running") for index in range(2)]

    def log(self, pod: PodLine, options: LogOptions) -> Iterator[bytes]:
        yield f"line of {pod.name}\n".encode()

    def kill(self, pod: str) -> None:
        self.killed.append(pod)


def client(place: Place) -> Client:
    return Client(place)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DDPJOB_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def fit(epochs: int) -> None:
    print(epochs)


def created(local: bool, *program: Any, **options: Any) -> tuple[Json, Json]:
    """Return (code by key, the job)."""
    place = Place(local)
    made = client(place).train(*program, name="j", image="a", **options)
    assert isinstance(made, Job) and made.name == "j"
    *code, body = place.created
    return {key: text for each in code for key, text in each["data"].items()}, body


def test_a_function_can_be_sent_to_a_cluster_and_to_this_machine(runs: Path) -> None:
    code, here = created(True, fit, args={"epochs": 2}, nodes=2, gpus=0)
    sent, there = created(False, fit, args={"epochs": 2}, nodes=2, gpus=0)
    assert code == sent and "def fit(epochs: int)" in code["function.py"]
    assert here["spec"].pop("script") == f"{runs}/j/code/function.py"
    assert there["spec"].pop("script") == f"{CODE_FOLDER}/function.py"
    assert there["spec"].pop("podTemplate")["spec"]["containers"][0]["volumeMounts"][0]["mountPath"] == CODE_FOLDER
    assert here == there and here["spec"] == {"image": "a", "nodes": 2, "gpusPerNode": 0}


@pytest.mark.parametrize("local", [True, False])
def test_a_job_is_created_from_a_script_or_module_with_settings(local: bool, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    settings = {"recovery.maxRestarts": 3, "spec.storage.sharedMemory": "8Gi"}
    _, body = created(local, tmp_path / "train.py", args=["--lr", "1e-4"], env={"A": "1"}, settings=settings)
    assert body["spec"]["script"].endswith("/train.py") and body["spec"]["args"] == ["--lr", "1e-4"]
    assert body["spec"]["recovery"] == {"maxRestarts": 3} and body["spec"]["storage"] == {"sharedMemory": "8Gi"}
    assert created(local, "pkg.train")[1]["spec"]["module"] == "pkg.train"


def test_settings_are_merged_with_other_options_without_being_modified() -> None:
    settings: Json = {
        "storage": {"sharedMemory": "8Gi"},
        "recovery": {"maxRestarts": 3},
        "resources": {"limits": {"example.com/nic": 1}},
        "podTemplate": {"spec": {"volumes": [{"name": "v", "emptyDir": {}}], "containers": [{"name": "trainer"}]}},
        "podTemplate.spec.nodeSelector": {"a": "b"},
    }
    before = copy.deepcopy(settings)
    options = {"checkpoints": "claim:c", "mode": "Fast", "memory": "1Gi", "settings": settings}
    spec = created(False, fit, args={"epochs": 2}, **options)[1]["spec"]
    assert settings == before
    assert spec["storage"] == {"checkpoints": {"claimName": "c"}, "sharedMemory": "8Gi"}
    assert spec["recovery"] == {"mode": "Fast", "maxRestarts": 3}
    amounts = {"requests": {"memory": "1Gi"}, "limits": {"memory": "1Gi", "example.com/nic": 1}}
    assert spec["resources"] == amounts
    template = spec["podTemplate"]["spec"]
    assert [volume["name"] for volume in template["volumes"]] == ["v", "code"]
    assert template["nodeSelector"] == {"a": "b"}
    assert created(False, "m", settings={"nodes": 2})[1]["spec"]["nodes"] == 2
    nothing = created(False, fit, args={"epochs": 2}, settings={"podTemplate": None})[1]["spec"]["podTemplate"]
    assert [volume["name"] for volume in nothing["spec"]["volumes"]] == ["code"]
    with pytest.raises(Mistake, match="volumes: must be a list"):
        created(False, fit, args={"epochs": 2}, settings={"podTemplate.spec.volumes": {"name": "v"}})


def test_path_objects_are_accepted_wherever_strings_are(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "run.py").write_text("")
    settings = {"podTemplate.spec.tolerations": ({"key": "a", "operator": "Exists"},), "workingDir": Path("/w")}
    options: Json = {"args": [Path("x")], "env": {"A": Path("y")}, "checkpoints": Path("/z"), "settings": settings}
    spec = created(False, tmp_path / "project", entry=Path("run.py"), **options)[1]["spec"]
    assert (spec["args"], spec["env"], spec["workingDir"]) == (["x"], [{"name": "A", "value": "y"}], "/w")
    assert spec["script"] == f"{CODE_FOLDER}/run.py" and spec["storage"] == {"checkpoints": {"hostPath": "/z"}}
    assert spec["podTemplate"]["spec"]["tolerations"] == [{"key": "a", "operator": "Exists"}]


def too_large() -> None:
    print("LARGE")


@pytest.mark.parametrize("local", [True, False])
def test_mistakes_in_a_job_are_reported_before_anything_is_created(
    local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(local)
    train = client(place).train
    wrong: list[tuple[Any, Mapping[str, Any], str]] = [
        (lambda: None, {}, "a lambda"),
        ("no-such.py", {}, "no such file or folder on this machine"),
        (fit, {"args": {"epochs": 1}, "nodes": 0}, r"spec\.nodes: 0 is less than 1"),
        (fit, {"args": {"epochs": 1}, "name": "A b"}, "a name can have at most 40 characters"),
        (fit, {"args": {"epochs": 1}, "settings": {"recovry.mode": "Fast"}}, "did you mean recovery"),
        (
            fit,
            {"args": {"epochs": 1}, "entry": "train.py"},
            r"entry .* is for a script in a folder, but fit is not a folder",
        ),
        ("m", {"env": {"A": "1"}, "settings": {"env": []}}, r"env \(--set\): another option also sets this list"),
        ("m", {"args": [object()]}, r"args\[0\]: <object .* must be a string"),
        ("m", {"settings": {"storage": {"data": {1: "a"}}}}, r"settings .*storage\.data: \{1: 'a'\} must be a string"),
        (Path("job.yaml"), {}, r"job\.yaml: a manifest, not a script; pass it to submit\(\)"),
    ]
    for program, options, said in wrong:
        with pytest.raises(Mistake, match=said):
            train(program, **{"image": "a", "name": "j", **options})
    with pytest.raises(TypeError, match="a mapping of its keyword arguments"):
        train(fit, args=["3"], image="a")
    for words in ("--epochs 3", {"epochs": 3}):
        with pytest.raises(TypeError, match="a list of strings"):
            train("pkg.train", args=words, image="a")
    monkeypatch.setattr("ddpjob.client.manifests.function_source.inspect.getsource",
                        lambda function: f"def too_large():\n    print('{'x' * MOST_BYTES}')\n")  # fmt: skip
    with pytest.raises(Mistake, match="too_large: contains more than 1008 KiB"):
        train(too_large, image="a")
    with pytest.raises(Mistake, match=r"train\.py: a manifest's name must"):
        client(place).submit("train.py")
    with pytest.raises(Mistake, match=r"metadata\.name: required, but missing; name the job \(the manifest\)"):
        client(place).submit({"kind": "DDPJob"})
    with pytest.raises(Mistake, match=r"spec\.nodez: unknown field; did you mean nodes\? \(the manifest\)"):
        client(place).submit(job() | {"spec": {"image": "a", "module": "m", "nodez": 2}})
    assert not place.created
    if not local:
        with pytest.raises(Mistake, match=r"image .* missing"):
            train("pkg.train")


FAILED = {"type": "Failed", "status": "True", "reason": "WorkerFailed", "message": "rank 0 raised",
          "lastTransitionTime": "2026-01-01T00:00:00Z"}  # fmt: skip
ENDS = [
    ("Complete", (job(phase="Complete"), False), None),
    ("Complete", (job(phase="Failed", conditions=[FAILED]), False), "j: WorkerFailed: rank 0 raised"),
    ("Complete", (job(phase="Interrupted"), False), "j is Interrupted"),
    ("Suspended", (job(phase="Complete"), False), "j is Complete"),
    ("Running", (job(), False), None),
    ("Suspended", (job(), True), "j was deleted"),
]


def test_an_unknown_goal_is_refused_before_waiting() -> None:
    with pytest.raises(ValueError, match="goal 'running': write 'Complete', 'Running' or 'Suspended'"):
        client(Place(False)).wait("j", goal="running")  # type: ignore[arg-type]


@pytest.mark.parametrize(("goal", "end", "said"), ENDS)
def test_a_wait_ends_when_the_job_ends(goal: Any, end: tuple[Json, bool], said: str | None) -> None:
    place = Place(False, (job(phase="Pending"), False), (job(phase="Starting"), False), end)
    if said is None:
        assert client(place).wait("j", goal=goal).phase == goal
        return
    with pytest.raises(JobFailed, match=said) as failed:
        client(place).wait("j", goal=goal)
    assert failed.value.job.phase == end[0]["status"]["phase"]


def test_a_watch_yields_each_state_until_the_job_ends() -> None:
    place = Place(False, *((job(phase=phase), False) for phase in ("Pending", "Running", "Failed", "Running")))
    assert [seen.phase for seen in client(place).watch("j")] == ["Pending", "Running", "Failed"]
    with pytest.raises(TimeoutError, match="j is still Running after 1 s"):
        client(Place(False, (job(), False))).wait("j", timeout=1)


def test_the_result_of_a_wait_depends_on_the_final_state(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(False, (job(), False))
    for phase, conditions in (("Complete", []), ("Failed", [FAILED])):
        monkeypatch.setattr(place, "job", lambda name, p=phase, c=conditions: job(phase=p, conditions=c))
        if phase == "Complete":
            assert client(place).wait("j", timeout=1).phase == phase
        else:
            with pytest.raises(JobFailed, match="j: WorkerFailed: rank 0 raised"):
                client(place).wait("j", timeout=1)


def test_a_job_in_a_notebook_is_shown_in_one_line() -> None:
    """The job's spec, status and body would be thousands of characters."""
    assert repr(Job.read(job())) == "Job(name='j', namespace='', phase='Running')"


def test_progress_has_the_right_types_even_if_the_script_reports_invalid_values() -> None:
    reported = {
        "epoch": 2,
        "steps": 9.0,
        "loss": 1,
        "samplesPerSecond": True,
        "percent": "much",
        "step": float("nan"),
        "metrics": {"a": 1, "b": "c"},
    }
    seen = Job.read(job(progress=reported))
    assert seen.progress == Progress(epoch=2, steps=9, loss=1.0, metrics={"a": 1.0})
    assert Job.read(job(progress={"metrics": 3})).progress == Progress()
    assert not seen.ended and Job.read(job(phase="Interrupted")).ended


def test_logs_follow_a_rank_to_the_replacement_of_its_pod() -> None:
    place = Place(True, (job(), False))
    jobs = client(place)
    assert set(jobs.logs("j")) == {("j-0-0", "line of j-0-0"), ("j-1-0", "line of j-1-0")}
    assert list(jobs.logs(jobs.get("j"), rank=1)) == [("j-1-0", "line of j-1-0")]
    assert list(jobs.logs("j", index=0)) == [("j-0-0", "line of j-0-0")]
    jobs.kill(jobs.pods("j")[1])
    jobs.kill("j-0-0")
    assert place.killed == ["j-1-0", "j-0-0"]


def test_interrupted_logs_leave_no_reader_thread_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    place, ended = Place(True, (job(), False)), threading.Event()

    def endless(pod: PodLine, options: LogOptions) -> Iterator[bytes]:
        yield b"line\n"
        if options.stop is not None and options.stop.wait(60):
            ended.set()

    monkeypatch.setattr(place, "log", endless)
    for _ in client(place).logs("j", index=0, follow=True):
        break
    assert ended.wait(20)


def test_logs_that_do_not_exist_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(True, (job(), False))
    with pytest.raises(Mistake, match="j has no rank 7; the ranks are 0 to 1"):
        list(client(place).logs("j", rank=7))
    silent = Place(True, (job(), False))
    monkeypatch.setattr(silent, "log", lambda pod, options: iter(()))
    with pytest.raises(Mistake, match="rank 1 of j has written nothing"):
        list(client(silent).logs("j", rank=1))
    with pytest.raises(Mistake, match="j has no pod in slot 9; the slots are 0 to 1"):
        list(client(place).logs("j", index=9))
    read = place.log

    def one_refused(pod: PodLine, options: LogOptions) -> Iterator[bytes]:
        if pod.index == 0:
            raise Mistake("no right")
        yield from read(pod, options)

    monkeypatch.setattr(place, "log", one_refused)
    with pytest.warns(UserWarning, match="pod j-0-0: no right"):
        assert list(client(place).logs("j")) == [("j-1-0", "line of j-1-0")]


def test_unreadable_logs_are_not_shown_as_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(True, (job(), False))

    def refused(pod: PodLine, options: LogOptions) -> Iterator[bytes]:
        raise Mistake("no right")

    monkeypatch.setattr(place, "log", refused)
    with pytest.raises(Mistake, match="pod j-0-0: no right"):
        list(client(place).logs("j"))


METRICS = """\
{"event": "start", "step": 0}
{"event": "step", "step": 1, "loss": 2.0, "samplesPerSecond": 10}
{"event": "step", "step": 2, "loss": 0.5}
{"event": "eval", "step": 2, "accuracy": 0.75}
"""


class Measured(Place):
    """A backend whose job has metrics."""

    def metrics(self, name: str) -> str:
        return METRICS


def test_metrics_are_returned_as_rows_for_a_data_frame() -> None:
    place = Measured(True, (job(), False))
    rows = [{"step": 1, "loss": 2.0, "samplesPerSecond": 10.0}, {"step": 2, "loss": 0.5, "eval_accuracy": 0.75}]
    client = Client(place)  # type: ignore[arg-type]
    assert client.metrics("j") == client.get("j").metrics() == rows


def test_a_notebook_shows_a_job_with_its_curve_and_escapes_its_strings() -> None:
    hostile = {"display": "<script>alert(1)</script>", "lossDisplay": "0.5"}
    shown = Client(Measured(True, (job(progress=hostile), False))).get("j")._repr_html_()  # type: ignore[arg-type]
    assert "<svg" in shown and "loss from 2 to 0.5, steps 1 to 2" in shown and "Running</b>" in shown
    assert "<script>" not in shown and "&lt;script&gt;" in shown
    assert "<svg" not in Job.read(job())._repr_html_()


def test_waiting_shows_the_jobs_state_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    states = [(job(progress={"display": f"step {n}", "lossDisplay": "0.1"}), False) for n in (1, 1, 2)]
    place = Place(True, *states, (job(phase="Complete"), False))
    waited = Client(place).get("j").wait(progress=True)  # type: ignore[arg-type]
    assert waited.phase == "Complete"
    said = capsys.readouterr().out
    assert said.count("\r") == 3 and said.count("\n") == 1 and "\rj  Running  step 2  0.1" in said
    Client(place).wait("j")  # type: ignore[arg-type]
    assert capsys.readouterr().out == "", "only a notebook displays the line by itself"


def test_a_mistake_in_a_notebook_shows_only_its_message() -> None:
    assert Mistake("no job j")._render_traceback_() == ["Mistake: no job j"]
    with pytest.raises(Mistake, match=r"use Client\.get"):
        Job.read(job()).wait()


def test_metrics_can_be_returned_as_a_pandas_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test uses a stand-in for pandas, which is not installed here."""

    class Frame:
        def __init__(self, rows: list[Json]) -> None:
            self.rows = rows

        def set_index(self, column: str) -> tuple[str, list[Json]]:
            return column, self.rows

    measured = Client(Measured(True, (job(), False)))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(Mistake, match="pip install pandas"):
        measured.frame("j")
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=Frame))
    assert measured.frame("j") == ("step", measured.metrics("j"))


def test_a_plot_can_be_shown_in_a_notebook_and_saved_to_a_file(tmp_path: Path) -> None:
    seen = Client(Measured(True, (job(), False))).get("j")  # type: ignore[arg-type]
    curve = seen.plot(output=tmp_path / "a.svg")
    assert repr(curve) == "<MetricCurve: loss from 2 to 0.5, steps 1 to 2>" and "<polyline" in curve._repr_html_()
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")
    with pytest.raises(Mistake, match="fewer than two values of recall so far; its metrics: eval_accuracy, loss"):
        seen.plot("recall")
    with pytest.raises(Mistake, match=r"must end in \.svg; for .png and .pdf, run `ddpjob plot j"):
        seen.plot(output="a.png")


def test_a_curve_that_falls_by_orders_of_magnitude_has_a_logarithmic_scale() -> None:
    curve = MetricCurve("loss", [(1, 1.0), (2, 0.1), (3, 0.01)])
    assert curve.label == "loss from 1 to 0.01, steps 1 to 3, on a logarithmic scale"
    assert 'points="0.0,2.0 240.0,45.0 480.0,88.0"' in curve._repr_svg_()
    assert "logarithmic" not in MetricCurve("accuracy", [(1, 0.0), (2, 0.9)]).label


@pytest.mark.parametrize("length", [0, 1, 2, 479, 480, 481, 959, 960, 5000])
def test_a_long_curve_is_thinned_but_keeps_its_ends(length: int) -> None:
    points = [(step, float(step)) for step in range(length)]
    kept = MetricCurve("loss", points).points
    assert len(kept) <= 480 and kept[:1] == points[:1] and kept[-1:] == points[-1:]
    assert length > 480 or kept == points


def test_a_plot_marks_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [{"event": "start", "step": 0}, {"event": "step", "step": 1, "loss": 2.0}, {"event": "start", "step": 1}]
    lines += [{"event": "step", "step": step, "loss": 1.0} for step in (2, 3)]
    lines.insert(4, {"event": "start", "step": 2})
    text = "\n".join(map(json.dumps, lines))
    monkeypatch.setattr(Measured, "metrics", lambda place, name: text)
    curve = Client(Measured(True, (job(), False))).plot("j")  # type: ignore[arg-type]
    assert curve._repr_svg_().count("stroke-dasharray") == 1, "a restart at the first step is marked at the edge"


def test_a_manifest_is_validated_without_a_cluster(tmp_path: Path) -> None:
    client = Client(Place(False))  # type: ignore[arg-type]
    client.validate({key: value for key, value in job().items() if key != "status"})
    (tmp_path / "bad.yaml").write_text(
        "apiVersion: ddpjob.io/v1alpha1\nkind: DDPJob\nmetadata: {name: a}\nspec: {nods: 2}\n"
    )
    with pytest.raises(Mistake, match=r"spec\.nods: .*bad\.yaml, line 4"):
        client.validate(tmp_path / "bad.yaml")
    with pytest.raises(Mistake, match="image"):
        client.validate({"apiVersion": "ddpjob.io/v1alpha1", "kind": "DDPJob", "metadata": {"name": "a"}, "spec": {}})


def test_a_restart_suspends_and_resumes_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(True, (job(phase="Suspended"), False))
    patches = list[Json]()
    place.pods = lambda name: []  # type: ignore[method-assign,assignment]
    monkeypatch.setattr(Place, "patch", lambda place, name, spec: patches.append(spec["runPolicy"]), raising=False)
    client(place).restart("j")
    assert patches == [{"suspend": True}, {"suspend": False}]

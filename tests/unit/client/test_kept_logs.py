"""Kept logs of pods that are gone, read from a folder, through a running pod, and from a bucket."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ddpjob.cli.main import main
from ddpjob.cli.places import Place
from ddpjob.client.backends.backend import LogOptions, Mistake, NoSuchJob, PodLine
from ddpjob.client.backends.cluster_backend import ClusterBackend
from ddpjob.client.backends.kept_logs import in_folder, parse_listing
from ddpjob_runtime.protocol import LOGS_FOLDER, MAX_KEPT_LOG
from s3_server import BUCKET, serving

UID = "0123abcd-0000-4000-8000-000000000000"
Json = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a checkpoint folder with the logs of two pods, and files that are not logs."""
    logs = tmp_path / LOGS_FOLDER
    logs.mkdir()
    (logs / "j-1-0.0123abcd.log.1").write_text("old\n")
    (logs / "j-1-0.0123abcd.log").write_text("one\n\x1b[31mtwo\n")
    (logs / "j-0-10.0123abcd.log").write_text("ten\n")
    (logs / "j-0-9.0123abcd.log").write_text("nine\n")
    (logs / "j-0-1.ffffffff.log").write_text("of an earlier job\n")
    (logs / "j-x-1.0123abcd.log").touch()
    (logs / "j-3-0.0123abcd.log").symlink_to("/etc/passwd")
    (logs / "j-4-0.0123abcd.log").mkdir()
    os.mkfifo(logs / "j-5-0.0123abcd.log")
    with (logs / "j-6-0.0123abcd.log").open("wb") as file:
        file.truncate(1 << 40)
    return tmp_path


def test_only_regular_files_of_the_jobs_own_pods_are_read(folder: Path) -> None:
    kept = in_folder(folder, "j", UID)
    assert [pod.name for pod in kept.pods()] == ["j-0-9", "j-0-10", "j-1-0"]
    assert [pod.name for pod in kept.pods({"j-0-9"})] == ["j-0-10", "j-1-0"]
    assert kept.text("j-1-0", LogOptions()) == b"old\none\n\x1b[31mtwo\n"
    assert kept.text("j-1-0", LogOptions(tail=1)) == b"\x1b[31mtwo\n" and kept.text("j-1-0", LogOptions(tail=0)) == b""
    for name in ("j-3-0", "j-4-0", "j-5-0", "../j-1-0"):
        assert kept.read(f"{name}.0123abcd.log") == b""
    with pytest.raises(Mistake, match="pod j-3-0 is gone, and its log was not kept"):
        kept.text("j-3-0", LogOptions())
    with pytest.raises(Mistake, match="--since: kept logs contain no timestamps"):
        kept.text("j-1-0", LogOptions(since=1))


def test_a_folder_of_kept_logs_that_is_a_link_is_not_read(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / LOGS_FOLDER).symlink_to(folder / LOGS_FOLDER)
    assert in_folder(tmp_path / "other", "j", UID).pods() == []


@pytest.mark.parametrize(
    "text",
    ["", "[", "[" * 100_000, "{}", "[1]", '[["a"]]', '[["j-0-0.0123abcd.log", "1"], ["j-0-0.0123abcd.log", true]]',
     '[["../j-0-0.0123abcd.log", 1], ["j-0-0.0123abcd.log\\n", 1]]', '[[["x"], 1]]',
     f'[["j-0-0.0123abcd.log", {2**40}]]'],
)  # fmt: skip
def test_a_hostile_pods_list_of_logs_is_ignored(text: str) -> None:
    assert parse_listing(text) == {}


class OfCluster(ClusterBackend):
    """A backend whose pods run commands on this machine. Their checkpoint folder is `folder`."""

    def __init__(
        self, folder: Path, checkpoints: Json, pods: tuple[str, ...] = ("j-0-11", "j-1-1"),
        ended: tuple[str, ...] = (), **spec: object,
    ) -> None:  # fmt: skip
        super().__init__(api=None, namespace="ml")  # type: ignore[arg-type]
        self.folder, self.names, self.ended, self.asked = folder, pods, ended, list[str]()
        self.spec = {"storage": {"checkpoints": checkpoints}, "runPolicy": {"logsKept": 3}, **spec}

    def jobs(self) -> list[Json]:
        return [self.job("j")]

    def job(self, name: str) -> Json:
        if name != "j":
            raise NoSuchJob(f"no job {name}")
        return {"metadata": {"name": "j", "uid": UID}, "spec": self.spec}

    def pods(self, name: str) -> list[PodLine]:
        states = {**dict.fromkeys(self.ended, "Error (1)"), **dict.fromkeys(self.names, "Running")}
        return [
            PodLine(pod, "node", int(pod.split("-")[1]), state, ended=pod in self.ended)
            for pod, state in states.items()
        ]

    def run_in(self, pod: PodLine, code: str) -> str:
        self.asked.append(pod.name)
        variables = {"DDPJOB_CHECKPOINT_DIR": str(self.folder)}
        made = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, check=True)
        return made.stdout.decode(errors="replace")


def called(backend: ClusterBackend, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(Place, "backend", lambda place, **options: backend)
    return main(words)


def test_the_kept_log_of_a_pod_that_is_gone_is_printed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = OfCluster(folder, {"claimName": "c", "mountPath": "/c"})
    assert called(backend, monkeypatch, "logs", "j", "--ended") == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "j-0-9  Gone  only the last 5 bytes of its log are kept" and "j-1-0  Gone" in out
    assert backend.asked == ["j-0-11"], "all pods see the same volume"
    assert called(backend, monkeypatch, "logs", "j-1-0", "-f") == 0
    assert capsys.readouterr().out == "old\none\n\x1b[31mtwo\n"
    assert called(backend, monkeypatch, "logs", "j-7-0") == 2
    assert "job j has no pod j-7-0; its pods: j-0-11" in capsys.readouterr().err


def test_if_no_running_pod_can_read_the_kept_logs_a_message_says_where_they_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = OfCluster(folder, {"claimName": "c", "mountPath": "/c"}, pods=())
    assert called(ended, monkeypatch, "logs", "j-1-0") == 2
    said = capsys.readouterr().err
    assert "job j has no pod j-1-0" in said and f"cat /c/{LOGS_FOLDER}/POD.*" in said
    assert called(ended, monkeypatch, "logs", "j", "--ended") == 2


def test_terminated_pods_are_listed_even_if_their_logs_cannot_be_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = OfCluster(folder, {"claimName": "c", "mountPath": "/c"}, pods=(), ended=("j-0-11",))
    assert called(failed, monkeypatch, "logs", "j", "--ended") == 0
    out, said = capsys.readouterr()
    assert out == "j-0-11  Error (1)\n" and f"no running pod can read /c/{LOGS_FOLDER}" in said


@pytest.mark.parametrize(
    ("checkpoints", "spec"),
    [({}, {}), ({"claimName": "c"}, {"runPolicy": {"logsKept": 0}}), ({"claimName": "c"}, {"command": ["a"]}),
     ({"claimName": "c", "readOnly": True}, {}), ({"url": "s3://b/f"}, {"command": ["a"]})],
)  # fmt: skip
def test_no_kept_logs_are_announced_for_a_job_that_keeps_none(
    checkpoints: Json, spec: Json, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = OfCluster(tmp_path, checkpoints, pods=(), **spec)
    assert called(backend, monkeypatch, "logs", "j", "--ended") == 1
    assert "j: no logs of terminated pods are kept" in capsys.readouterr().err


def test_the_option_rank_is_refused_for_a_kept_log(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = OfCluster(folder, {"claimName": "c", "mountPath": "/c"})
    assert called(backend, monkeypatch, "logs", "j-1-0", "--rank", "0") == 2
    assert "--rank: pod j-1-0 is gone" in capsys.readouterr().err


def test_pods_on_each_host_are_asked_if_hosts_have_separate_files(folder: Path) -> None:
    backend = OfCluster(folder, {"hostPath": "/h", "mountPath": "/c"})
    assert [pod.name for pod in backend.kept_logs("j").pods()] == ["j-0-9", "j-0-10", "j-1-0"]
    assert backend.asked == ["j-0-11", "j-1-1"]


def test_a_pods_log_outlives_the_pod_in_a_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("obstore", reason="pip install obstore")
    with serving(tmp_path / "server") as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        code = (
            "from ddpjob_runtime.launcher import keep_log, pid1\nimport os\n"
            "pid1.become_init(keep_log.KeptLog.prepare())\n"
            "os.write(1, b'x' * 99 + b'\\n')\nos.write(1, (b'y' * 99 + b'\\n') * 20_000)\nos.kill(os.getpid(), 9)\n"
        )
        variables = {
            "DDPJOB_NAME": "j", "DDPJOB_INDEX": "1", "DDPJOB_UID": UID, "DDPJOB_LOGS_KEPT": "2",
            "DDPJOB_CHECKPOINT_URL": f"s3://{BUCKET}/runs/ml/j",
        }  # fmt: skip
        for attempt in range(3):
            made = subprocess.run(
                [sys.executable, "-c", code], capture_output=True,
                env={**os.environ, **variables, "DDPJOB_POD": f"j-1-{attempt}"},
            )  # fmt: skip
            assert (made.returncode, made.stderr, len(made.stdout)) == (137, b"", 2_000_100)
        backend = OfCluster(tmp_path, {"url": f"s3://{BUCKET}/runs", "endpoint": f"http://127.0.0.1:{server.port}"})
        assert [pod.name for pod in backend.kept_logs("j").pods()] == ["j-1-1", "j-1-2"], (
            "the oldest log exceeded the limit"
        )
        assert called(backend, monkeypatch, "logs", "j-1-2") == 0
        shown = capsys.readouterr().out
        assert shown.startswith("(") and shown.endswith("y\n") and MAX_KEPT_LOG // 2 < len(shown) <= MAX_KEPT_LOG
        assert backend.asked == [], "no command was run in a pod"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(Mistake, match=r"logs of terminated pods cannot be read: .*check AWS_ACCESS_KEY_ID"):
        backend.kept_logs("j")

"""Output by a JSONPath template, and the output of commands that wait for a job."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from ddpjob.cli import main as cli
from ddpjob.cli import waiting
from ddpjob.cli.output import PathTemplate
from ddpjob.cli.root import root
from ddpjob.local.paths import JobFolder

JOB: dict[str, Any] = {
    "metadata": {"name": "first", "labels": {"ddpjob.io/job": "first", "a.b.c": "d"}},
    "spec": {"nodes": 2},
    "status": {
        "phase": "Failed",
        "conditions": [{"type": "Running", "status": "False"}, {"type": "Failed", "status": "True", "reason": "Spent"}],
    },
}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{.status.phase}", "Failed"),
        ("{$.status.phase}{@.spec.nodes}", "Failed2"),
        ('{.metadata.name}: {.spec.nodes}{"\\n"}', "first: 2\n"),
        ("{.status.conditions[?(@.type=='Failed')].reason}", "Spent"),
        ('{.status.conditions[?(@.type=="Failed")].reason}', "Spent"),
        ("{.status.conditions[*].type}", "Running Failed"),
        ("{.status.conditions[-1].type}", "Failed"),
        (r"{.metadata.labels.ddpjob\.io/job}{.metadata.labels.a\.b\.c}", "firstd"),
        ("{.metadata.labels['a.b.c']}", "d"),
        ("{range .status.conditions[*]}{.type}={.status}{','}{end}.", "Running=False,Failed=True,."),
        ("{.status.nothing}|{.nothing.at.all}", "|"),
        ("{.spec}", '{"nodes": 2}'),
    ],
)
def test_an_output_template_works_as_in_kubectl(template: str, text: str) -> None:
    assert PathTemplate(template).text(JOB) == text


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("", "no path"),
        ("status.phase", "write one in braces"),
        ("{status.phase}", "{status.phase} is not a path; write a path such as {.status.phase}"),
        ("{.status", "unmatched {"),
        ("{.status[}", "{.status[}: "),
        ("{range .items[*]}{.x}", "{range PATH} without {end}"),
        ("{.x}{end}", "{end} without {range PATH}"),
        ("{'x}", "unmatched {"),
        ('{"\\q"}', "is not a quoted string"),
    ],
)
def test_an_invalid_template_is_refused_with_the_reason(
    template: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        PathTemplate(template)
    assert cli.main(["get", "-o", f"jsonpath={template}"]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


class Written:
    """A backend whose job shows these statuses in turn."""

    where = "here"

    def __init__(self, *statuses: dict[str, Any]) -> None:
        self.statuses = statuses

    def changes(self, name: str | None, seconds: float | None = None) -> Iterator[tuple[dict[str, Any], bool]]:
        for status in self.statuses:
            yield {"metadata": {"name": name, "namespace": "n"}, "spec": JOB["spec"], "status": status}, False


def test_a_command_that_waits_prints_states_restarts_and_occasional_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    restart = {"time": "2026-01-01T00:00:00Z", "pod": "first-1-0", "reason": "WorkerFailed", "counted": True}
    restart["message"] = "rank 1: boom"
    broken = {"phase": "Running", "restarts": {"total": 1, "counted": 1, "display": "1/10", "recent": [restart]}}
    further = [{**broken, "progress": {"step": n, "display": f"step {n} of 5,000"}} for n in range(5)]
    now = iter([0.0, 1.0, 2.0, *(3.0 + 15 * n for n in range(99))])
    monkeypatch.setattr(waiting.time, "monotonic", lambda: next(now))
    backend: Any = Written({"phase": "Starting"}, {"phase": "Running"}, broken, *further, {"phase": "Complete"})
    assert waiting.wait_for(backend, "first", "end", None) == 0
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert [line.split()[:2] for line in lines[:3]] == [["NAME", "STATE"], ["first", "Starting"], ["first", "Running"]]
    columns = [line.index("1/10") for line in lines if "1/10" in line and "WorkerFailed" not in line]
    assert len(columns) > 2 and {*columns} == {lines[0].index("RESTARTS")}, "no column moves"
    assert "WorkerFailed: rank 1: boom (counted)" in lines[3] and lines[4].split()[:2] == ["first", "Running"]
    assert ["step" in line for line in lines[5:]].count(True) == len(lines[5:]) in (2, 3), "of five"
    assert out.startswith("first is Complete")


@pytest.mark.parametrize(
    ("where", "code", "said"),
    [("| true", 141, ""), ("> /dev/full", 2, "standard output: No space left on device\n")],
)
def test_a_closed_output_does_not_make_the_exit_code_report_a_failed_job(where: str, code: int, said: str) -> None:
    """Exit code 1 means that a job has failed."""
    line = f"{sys.executable} -m ddpjob.cli explain spec {where}"
    ended = subprocess.run(["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (code, said)


@pytest.mark.parametrize("command", [["run"], ["validate"], ["submit", "--local"]])
def test_a_closed_standard_input_counts_as_empty(command: list[str]) -> None:
    """Batch systems start programs this way. Regression: a traceback said that 'NoneType' has no
    attribute 'read'.
    """
    words = [sys.executable, "-m", "ddpjob.cli", *command, "-"]
    ran = subprocess.run(["sh", "-c", 'exec "$@" <&-', "sh", *words], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (2, "standard input: empty; expected a DDPJob\n")


RED, YELLOW = "\x1b[31m", "\x1b[33m"


@pytest.mark.parametrize(
    ("command", "painted"),
    [
        ("get", f"{RED}Failed\x1b[0m"),
        ("why", f"{RED}j failed: "),
        ("describe", f"{RED}Failed\x1b[0m"),
        ("events", f"{YELLOW}! "),
    ],
)
@pytest.mark.parametrize("output", ["terminal", "terminal with NO_COLOR", "pipe"])
def test_states_and_warnings_are_coloured_only_in_a_terminal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, painted: str, output: str
) -> None:
    """Regression: only `ddpjob run` and `ddpjob top` had colours."""
    monkeypatch.setitem(root.context_settings, "color", None)  # main() sets this for NO_COLOR
    monkeypatch.delenv("NO_COLOR", raising=False)
    if output == "terminal with NO_COLOR":
        monkeypatch.setenv("NO_COLOR", "")
    job = JobFolder(tmp_path / "j")
    job.path.mkdir()
    failed = {"type": "Failed", "status": "True", "reason": "RestartBudgetSpent", "message": "rank 1"}
    failed["lastTransitionTime"] = "2026-01-01T00:00:00Z"
    event = {"time": "2026-01-01T00:00:00Z", "warning": True, "reason": "WorkerFailed", "message": "rank 1 failed"}
    body = {
        "apiVersion": "ddpjob.io/v1alpha1",
        "kind": "DDPJob",
        "metadata": {"name": "j", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"image": "a", "script": "b.py", "nodes": 2},
        "status": {"phase": "Failed", "conditions": [failed]},
        "local": {"run": "r", "pods": []},
    }
    job.status.write_text(json.dumps(body))
    job.run("r").path.mkdir()
    job.run("r").events.write_text(json.dumps(event) + "\n")
    monkeypatch.setenv("DDPJOB_RUNS", str(tmp_path))
    reader, writer = os.pipe() if output == "pipe" else pty.openpty()
    with open(writer, "w") as stream:  # noqa: PTH123 - a descriptor
        monkeypatch.setattr(sys, "stdout", stream)
        cli.main(["--local", command, "j"])
        monkeypatch.undo()
    said = b""
    with open(reader, "rb", buffering=0) as shown, suppress(OSError):  # noqa: PTH123 - a terminal ends with EIO
        while part := shown.read(65536):
            said += part
    assert (painted.encode() in said) is (output == "terminal"), said
    assert (b"\x1b" in said) is (output == "terminal"), said

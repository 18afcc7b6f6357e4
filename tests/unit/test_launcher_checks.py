"""What the launcher checks before anything starts, and what it leaves behind at its end."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import ddpjob.podfiles
import pytest

sys.path.insert(0, str(Path(ddpjob.podfiles.__file__).parent))  # as in a job pod: flat files

import departure
import wire
from entrypoint import InitFailure, check_command, check_module, check_script
from link import Link


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, text in {
        "train.py": "", "pkg/__init__.py": "raise RuntimeError('must not be imported')", "pkg/train.py": "", "pkg/sub/deep.py": "",
        "runnable/__init__.py": "", "runnable/__main__.py": "", "spaces/one/two.py": "",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)


def test_what_exists_passes() -> None:
    check_script("train.py")
    check_script(str(Path.cwd() / "pkg/train.py"))
    check_script("runnable")
    for name in ("train", "pkg.train", "pkg.sub.deep", "runnable", "spaces.one.two", "torch.distributed.run", "json.tool"):
        check_module(name)
    check_command("sh")
    check_command(sys.executable)


@pytest.mark.parametrize(
    ("check", "name", "why"),
    [
        (check_script, "missing.py", "does not exist"),
        (check_script, "pkg", "folder without __main__.py"),
        (check_module, "missing", "no module named 'missing'"),
        (check_module, "pkg.missing", "no module named 'pkg.missing'"),
        (check_module, "train.inner", "'train' is not a package"),
        (check_module, "pkg", "without __main__.py"),
        (check_command, "no-such-command", "not on PATH"),
    ],
)
def test_what_is_missing_is_named_with_where_it_was_looked_for(check: object, name: str, why: str) -> None:
    with pytest.raises(InitFailure) as caught:
        check(name)  # type: ignore[operator]
    assert why in str(caught.value)
    if check is not check_command:
        assert str(Path.cwd()) in str(caught.value)


def test_the_termination_log_keeps_the_end_of_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "end"
    monkeypatch.setenv("DDPJOB_TERMINATION_LOG", str(log))
    departure.write_termination_log("Error", "message", "first line\n" + '\u00e4 "quoted"\n' * 3000 + "ValueError: the end")
    assert len(log.read_bytes()) <= 4096
    content = json.loads(log.read_text())
    assert content["kind"] == "Error" and content["message"] == "message" and content["traceback"].endswith("ValueError: the end")


def test_a_link_that_fails_ends_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[tuple[int, str, str]] = []

    def break_down() -> None:
        raise LookupError("unknown encoding: idna")

    link = Link("host:1", {}, "Standard", 1.0, lambda *end: ends.append(end))
    monkeypatch.setattr(link, "_connect", break_down)
    link.start()
    link._thread.join(5)
    assert ends == [(1, "Error", "the link to the coordinator has failed: LookupError: unknown encoding: idna")]


def test_the_first_name_is_looked_up_by_the_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """glibc reads the environment for it, and getenv in a thread crashes the process while another thread sets a variable."""
    lookers: list[threading.Thread] = []
    link = Link("host:1", {}, "Standard", 1.0, lambda *end: None)
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: lookers.append(threading.current_thread()))
    monkeypatch.setattr(link, "_connect", lambda: link.close())
    link.start()
    link._thread.join(5)
    assert lookers[:1] == [threading.main_thread()]


def test_addresses_and_lines() -> None:
    with pytest.raises(ValueError, match="host:port"):
        Link("nowhere", {}, "Standard", 1.0, lambda *_: None)
    assert wire.decode(wire.encode("hello", pod="p")) == {"t": "hello", "pod": "p"}
    assert wire.iso(0.25) == "1970-01-01T00:00:00.250Z"
    assert wire.clip("abcdefgh", 6) == "a...gh", "a message's kind stands at its beginning, a traceback's error at its end"

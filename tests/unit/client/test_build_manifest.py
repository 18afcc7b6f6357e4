"""Code sent with a job: every file keeps its own name, and files that are too large are refused
unread.
"""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest
from ddpjob.client.backends.backend import Mistake
from ddpjob.client.manifests.build_manifest import JobRequest, build


def arrived(folder: Path) -> dict[str, bytes]:
    """Return the files as the pods see them."""
    code, job = build(JobRequest(program=str(folder), image="a", name="j", entry="train.py"), local=False)
    [volume] = job["spec"]["podTemplate"]["spec"]["volumes"]
    contents = {key: text.encode() for key, text in code.get("data", {}).items()}
    contents |= {key: base64.b64decode(text) for key, text in code.get("binaryData", {}).items()}
    return {item["path"]: contents[item["key"]] for item in volume["configMap"]["items"]}


def test_file_names_that_differ_only_in_special_characters_stay_different(tmp_path: Path) -> None:
    names = ["train.py", "a b.py", "a_b.py", "a+b.py", "0.train.py", "lib/train.py", "lib2/train.py", "x" * 250]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"# {name}")
    (tmp_path / "weights").write_bytes(b"\xff\x00")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("")
    assert arrived(tmp_path) == {name: f"# {name}".encode() for name in names} | {"weights": b"\xff\x00"}


def test_a_large_file_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "z.bin").touch()
    os.truncate(tmp_path / "z.bin", 1 << 36)

    def read(path: Path) -> bytes:
        assert path.name == "train.py"
        return b""

    monkeypatch.setattr(Path, "read_bytes", read)
    for program in (tmp_path, tmp_path / "z.bin"):
        with pytest.raises(Mistake, match="contains more than 1008 KiB"):
            build(JobRequest(program=str(program), image="a", name="j"), local=False)


def test_the_entry_must_be_among_the_files_that_are_sent(tmp_path: Path) -> None:
    """Regression: the job was created, but its pods did not find the script."""
    folder = tmp_path / "project"
    for name in ("train.py", "runs/train.py", ".old/train.py", "../train.py", "lib/train.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    for entry in ("runs/train.py", ".old/train.py", "../train.py", tmp_path / "train.py"):
        with pytest.raises(Mistake, match=r"excluded from the copy of .*\. Hidden files"):
            build(JobRequest(program=str(folder), image="a", name="j", entry=entry), local=False)
    for entry in ("lib/train.py", "./lib/../lib/train.py", folder / "lib/train.py"):
        made = build(JobRequest(program=str(folder), image="a", name="j", entry=entry), local=False)
        assert made[-1]["spec"]["script"] == "/ddpjob-code/lib/train.py"


def test_an_empty_program_name_is_not_taken_for_the_current_folder() -> None:
    with pytest.raises(Mistake, match="the program's name is empty"):
        build(JobRequest(program="", image="a", name="j"), local=True)

"""Checkpoints in format dcp of an earlier version: converting keeps every value, and runs nothing that they bring."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from ddpjob_trainer.checkpoints import dcp
from ddpjob_trainer.checkpoints.convert import convert
from ddpjob_trainer.commands.show_checkpoint import main
from ddpjob_trainer.errors import CheckpointError
from hostile import ALLOWED, before, calling, earlier, listed_anew, setting, unchanged
from torch.distributed.checkpoint import metadata

SNAPSHOT = {
    "step": 9,
    "sampler": {"epoch": 0, "consumed": 1, "size": 4},
    "model": {
        "a.b": torch.arange(6.0).reshape(2, 3),
        "last": torch.arange(48.0).reshape(2, 3, 2, 4).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 3),
        "half": torch.ones(3, dtype=torch.bfloat16),
    },
    "betas": (0.9, 0.99),
    5: [None, True, "x"],
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return earlier(tmp_path / "step-000000009.dcp", SNAPSHOT)


def same(path: Path) -> bool:
    dcp.check(path)
    found = dcp.read(path)
    tensors: dict[str, Any] = found["model"]
    return all(
        torch.equal(tensors[name], value) and tensors[name].dtype == value.dtype
        for name, value in SNAPSHOT["model"].items()  # type: ignore[attr-defined]
    ) and {**found, "model": 0} == {**SNAPSHOT, "model": 0}


def test_it_is_refused_with_the_command_that_converts_it(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CheckpointError, match=f"checkpoint convert {path}$"):
        dcp.read(path)
    assert main([str(path)]) == 1
    [row] = capsys.readouterr().out.splitlines()[1:]
    command = row.partition("python -m ddpjob_trainer checkpoint ")[2].split()
    assert main(command) == 0 and same(path)
    assert capsys.readouterr().out == f"{path}: converted\n"
    assert main(command) == 0 and capsys.readouterr().out == f"{path}: needs no conversion\n"


def test_an_early_3_11_wrote_the_members_of_an_enum_by_getattr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11.2 is python3 of Debian 12."""

    def by_name(self: Any, protocol: int) -> Any:
        return getattr, (type(self), self.name)

    monkeypatch.setattr(metadata._MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    path = earlier(tmp_path / "a.dcp", SNAPSHOT)
    assert b"getattr" in (path / ".metadata").read_bytes()
    assert convert(path) and same(path)


@pytest.mark.parametrize("name", sorted(ALLOWED))
def test_an_index_that_changes_what_it_names_changes_nothing(name: str, path: Path) -> None:
    index = path / ".metadata"
    index.write_bytes(before(index.read_bytes(), setting(name)))
    listed_anew(path)
    with pytest.raises(CheckpointError, match="is not a checkpoint that an earlier version has written"):
        convert(path)
    assert unchanged()


def rewritten(path: Path, hostile: bytes) -> None:
    """Put something hostile before the pickle of every archive in a file."""
    with zipfile.ZipFile(path) as archive:
        members = [(info, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w") as archive:
        for info, content in members:
            archive.writestr(info, before(content, hostile) if info.filename.endswith("data.pkl") else content)


@pytest.mark.parametrize("file", [".metadata", "tree.pt"])
def test_a_pickle_that_calls_a_function_calls_nothing(file: str, path: Path) -> None:
    made = path.parent / "made"
    if file == "tree.pt":
        rewritten(path / file, calling(made))
    else:
        (path / file).write_bytes(before((path / file).read_bytes(), calling(made)))
    listed_anew(path)
    assert convert(path) and not made.exists() and unchanged() and same(path)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (b"__0_0.distcp", b"../fence.jsn", "its index names '../fence.jsn'"),
        (b"TensorStorageMetadata", b"TensorStorageMetadatX", ""),
        (b"float32", b"qfloat3", "is not a checkpoint that an earlier version has written"),
        (b"0:step", b"0:stex", ""),
        (b"relative_path", b"relative_patX", "is not a checkpoint that an earlier version has written"),
    ],
)
def test_an_index_of_somebody_else_is_refused_and_nothing_changes(old: bytes, new: bytes, why: str, path: Path) -> None:
    index = path / ".metadata"
    index.write_bytes(index.read_bytes().replace(old, new))
    listed_anew(path)
    files = {entry.name: entry.read_bytes() for entry in path.iterdir()}
    if not why:
        assert convert(path) and same(path), "a class's name counts for nothing"
        return
    with pytest.raises(CheckpointError, match=why):
        convert(path)
    assert {entry.name: entry.read_bytes() for entry in path.iterdir()} == files


def test_a_damaged_one_is_refused_before_anything_of_it_is_read(path: Path) -> None:
    (path / ".metadata").write_bytes((path / ".metadata").read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"corrupt \(the checksum of \.metadata does not match\); nothing was"):
        convert(path)


def test_the_version_that_wrote_it_still_finds_all_that_it_needs(path: Path) -> None:
    was = json.loads((path / dcp.MANIFEST).read_text())
    convert(path)
    now = json.loads((path / dcp.MANIFEST).read_text())
    assert was["files"].items() <= now["files"].items() and was["step"] == now["step"]
    assert now["files"].keys() - was["files"].keys() == {"__reordered.distcp"}

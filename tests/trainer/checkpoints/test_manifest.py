"""The manifest of the dcp format: a written manifest can be read back, and any other content is
refused.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddpjob_trainer.checkpoints import manifest
from ddpjob_trainer.errors import CheckpointError
from hypothesis import given
from hypothesis import strategies as st

CHUNKS = [[[0, 0], [2, 3], "__0_0.distcp", 100], [[2, 0], [2, 3], "__1_0.distcp", 76]]
RECORDED: dict[str, Any] = {
    "format": 1,
    "step": 7,
    "epoch": None,
    "world": 2,
    "time": 1700000000.0,
    "files": {"__0_0.distcp": {"size": 124, "sha256": "0" * 64}, "__1_0.distcp": {"size": 100, "sha256": "1" * 64}},
    "tensors": {"0:a": {"dtype": "float32", "shape": [4, 3], "chunks": CHUNKS}},
    "state": {"dict": [["step", 7], ["a", {"tensor": "0:a"}]]},
}


def test_a_manifest_can_be_written_and_read_back_unchanged() -> None:
    found = manifest.read(manifest.write(RECORDED))
    assert found.metadata.step == 7 and found.files["__0_0.distcp"] == manifest.CheckpointFile(124, "0" * 64)
    assert {name: stored.written() for name, stored in found.tensors.items()} == RECORDED["tensors"]
    assert manifest.decode(found.state, lambda path, name: (path, name)) == {"step": 7, "a": (("a",), "0:a")}


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec="utf-8"))
TREES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(PLAIN.filter(lambda key: key == key), inner)
    ),
)


@given(tree=TREES)
def test_every_structure_of_values_survives_a_round_trip_with_its_types(tree: Any) -> None:
    found = manifest.decode(json.loads(json.dumps(manifest.encode(tree, lambda _, tensor: ""))), lambda path, name: "")
    assert repr(found) == repr(tree)


def test_a_value_that_json_cannot_hold_is_refused_with_its_path_and_the_remedy() -> None:
    with pytest.raises(
        CheckpointError, match=r"torch.dtype as a value at state\['a'\]\[1\].*set checkpoint.format=torc"
    ):
        manifest.encode({"a": [1, torch.float32]}, lambda _, tensor: "")
    with pytest.raises(CheckpointError, match=r"builtins.tuple as a key at state\['a'\]"):
        manifest.encode({"a": {(1, 2): 1}}, lambda _, tensor: "")


def chunk(number: int, place: int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(recorded: dict[str, Any]) -> None:
        recorded["tensors"]["0:a"]["chunks"][number][place] = value

    return change


def tensor(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda recorded: recorded["tensors"]["0:a"].update(values)


def top(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda recorded: recorded.update(values)


def file(name: str, **entry: Any) -> Callable[[dict[str, Any]], None]:
    return lambda recorded: recorded["files"].update({name: {"size": 9, "sha256": "0" * 64, **entry}})


DEEP = "[" * 5000 + "]" * 5000


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (chunk(0, 2, "../../secret"), "outside the files"),
        (chunk(0, 2, ".metadata"), "outside the files"),
        (chunk(0, 3, 101), "outside the files"),
        (chunk(0, 3, -1), "must be offsets, sizes, a file and a position"),
        (chunk(0, 3, 2**63), "must be offsets, sizes, a file and a position"),
        (chunk(0, 3, True), "must be offsets, sizes, a file and a position"),
        (chunk(0, 3, 1.0), "must be offsets, sizes, a file and a position"),
        (chunk(0, 0, [1, 0]), "do not cover its shape exactly once"),
        (chunk(0, 0, [0]), "do not cover its shape exactly once"),
        (chunk(0, 0, [-1, 0]), "must be offsets, sizes, a file and a position"),
        (chunk(1, 0, [1, 0]), "do not cover its shape exactly once"),
        (chunk(1, 0, [0, 0]), "do not cover its shape exactly once"),
        (chunk(1, 1, [1, 3]), "do not cover its shape exactly once"),
        (chunk(1, 1, [2, 0]), "do not cover its shape exactly once"),
        (tensor(chunks=[]), "do not cover its shape exactly once"),
        (tensor(chunks=CHUNKS[:1]), "do not cover its shape exactly once"),
        (tensor(shape=[10**15], chunks=[[[0], [10**15], "__0_0.distcp", 0]]), "outside the files"),
        (tensor(shape=[2**40, 2**40], chunks=[]), "lacks a known dtype, a shape or chunks"),
        (tensor(shape=[0, 2**63 - 1, 2], chunks=[]), "lacks a known dtype, a shape or chunks"),
        (tensor(shape=[1] * 65), "lacks a known dtype, a shape or chunks"),
        (tensor(dtype="qint8"), "lacks a known dtype, a shape or chunks"),
        (tensor(dtype="__class__"), "lacks a known dtype, a shape or chunks"),
        (tensor(shape="43"), "lacks a known dtype, a shape or chunks"),
        (lambda recorded: recorded["tensors"]["0:a"].pop("chunks"), "lacks a known dtype, a shape or chunks"),
        (top(tensors=[]), "tensors is not an object"),
        (top(files=[]), "files is not an object"),
        (file("../secret"), "must be a file's name"),
        (file(".."), "must be a file's name"),
        (file("a/b"), "must be a file's name"),
        (file("a\n"), "must be a file's name"),
        (file("a" * 300), "must be a file's name"),
        (file("a", size=-1), "must be a file's name"),
        (file("a", size=2**70), "must be a file's name"),
        (file("a", sha256="x"), "must be a file's name"),
        (top(state=[]), "state is not a dict"),
        (top(state={"dict": []}), "state does not name each tensor exactly once"),
        (top(state={"dict": [["a", {"tensor": "0:b"}]]}), "state does not name each tensor exactly once"),
        (
            top(state={"dict": [["a", [{"tensor": "0:a"}, {"tensor": "0:a"}]]]}),
            "state does not name each tensor exactly once",
        ),
        (top(state={"dict": [["a", {"tensor": "0:a", "tuple": []}]]}), "contains a value of an unknown type"),
        (top(state={"dict": [["a", {"float": "1"}]]}), "contains a value of an unknown type"),
        (top(state={"dict": [["a"]]}), "not a pair of key and value"),
        (top(state={"dict": [[["a"], 1]]}), "not a pair of key and value"),
        (top(format=2), "in format 2, but this trainer reads format 1"),
        (top(step=math.inf), "contains a value that is not a number"),
        (top(step=-1), "contains a value that is not a number"),
        (top(epoch="1"), "contains a value that is not a number"),
        (top(time=1e300), "contains a value that is not a number"),
        (top(time=math.nan), "contains a value that is not a number"),
    ],
)
def test_a_manifest_that_no_trainer_has_written_is_refused(change: Callable[[Any], None], why: str) -> None:
    recorded = copy.deepcopy(RECORDED)
    change(recorded)
    with pytest.raises(CheckpointError, match=why):
        manifest.read(manifest.write(recorded))


def test_tensors_larger_than_the_files_are_refused() -> None:
    """The manifest describes a million tensors that all refer to the same bytes."""
    recorded = copy.deepcopy(RECORDED)
    recorded["tensors"] = {f"{number}:a": RECORDED["tensors"]["0:a"] for number in range(9)}
    recorded["state"] = {"dict": [[number, {"tensor": f"{number}:a"}] for number in range(9)]}
    with pytest.raises(CheckpointError, match=r"need more bytes than its files contain \(224\)"):
        manifest.read(manifest.write(recorded))


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"7", b"\xff", DEEP.encode(), b"9" * 5000, b'{"sha256": 1}', b"[" * 100000]
)
def test_invalid_json_or_a_missing_checksum_is_refused(content: bytes) -> None:
    with pytest.raises(CheckpointError, match="corrupt"):
        manifest.read(content)


def test_a_manifest_that_would_fill_the_memory_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "LARGEST", 1000)
    with pytest.raises(CheckpointError, match="the limit is 1000"):
        manifest.read(b"[" * 1001)

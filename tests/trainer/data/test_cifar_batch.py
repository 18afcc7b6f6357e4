"""The reader of CIFAR pickles accepts every pickle that Python and numpy write, and rejects any
other instruction.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cifar_pickles import PIXELS, WRITTEN
from datasets import write_cifar_binary, write_cifar_python
from ddpjob_trainer import config
from ddpjob_trainer.data import cifar_batch
from ddpjob_trainer.data.catalog import open_data
from ddpjob_trainer.data.cifar_batch import read_batch
from ddpjob_trainer.errors import DataError

NAMES = sorted(cifar_batch._NAMES)


def written_by(writer: str) -> bytes:
    before, after = WRITTEN[writer]
    by_python3_in_protocol_2 = before.startswith(b"\x80\x02") and "2.7" not in writer
    return before + (PIXELS.decode("latin1").encode() if by_python3_in_protocol_2 else PIXELS) + after


def pixels(count: int = 3) -> Any:
    return np.random.default_rng(0).integers(0, 256, (count, 3072), dtype=np.uint8)


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


@pytest.mark.parametrize("writer", WRITTEN)
def test_a_batch_is_read_from_any_version_of_python_and_numpy(writer: str) -> None:
    data, labels = read_batch(written_by(writer), "data", "labels")
    assert data.dtype == np.uint8 and data.shape == (1, 3072) and data.tobytes() == PIXELS
    assert labels.dtype == np.int64 and labels.tolist() == [7]


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("dump", [pickle.dumps, pickle._dumps], ids=["C", "Python"])  # type: ignore[attr-defined]
def test_read_batch_agrees_with_this_pythons_unpickler(dump: Any, protocol: int) -> None:
    own = pixels()
    frozen = own.copy()
    frozen.setflags(write=False)
    for data in (own, np.asfortranarray(own), frozen, own[1:], own[:1]):
        for labels in ([1, 2**40, -5][: len(data)], np.arange(len(data))):
            # more names than the pickle memo's one-byte indices can address
            names = [f"{number}.png" for number in range(300)]
            content = dump({"filenames": names, "data": data, "labels": labels}, protocol=protocol)
            found = read_batch(content, "data", "labels")
            assert np.array_equal(found[0], data) and np.array_equal(found[1], labels)


class Forged:
    """An array whose dtype holds Python objects but claims otherwise. Reading an element would
    follow a forged pointer.
    """

    def __reduce__(self) -> Any:
        return np.zeros(1).__reduce_ex__(5)[0], (b"\x41" * 8, Lying(), (1,), "C")


class Lying:
    def __reduce__(self) -> Any:
        state = (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0)
        return np.dtype, ("V8", False, True), state


def test_a_forged_dtype_is_refused(tmp_path: Path) -> None:
    write_cifar_python(tmp_path)
    path = tmp_path / "cifar-10-batches-py" / "test_batch"
    path.write_bytes(pickle.dumps({"data": pixels(1), "labels": Forged()}, protocol=2))
    with pytest.raises(DataError, match=r"test_batch is not a valid CIFAR batch \(.* not uint8\).* binary version"):
        open_data(config.load(None, ["data.name=cifar10", f"data.dir={tmp_path}"]).data)


@pytest.mark.parametrize("code", ["O", "V8", "|O", "u1,O", "M8[s]", "f8", "U4", "S3", "i4", ">i8"])
def test_arrays_with_other_types_of_elements_are_refused(code: str) -> None:
    data = np.zeros((1, 4), np.dtype(code))
    for protocol in range(2, 6):
        with pytest.raises(ValueError, match=r"not uint8|no array or dtype|no dtype|does not belong"):
            read_batch(pickle.dumps({"data": data}, protocol), "data")


@pytest.mark.parametrize("state", ["setattr", "dict", "dtype's", "array's"])
@pytest.mark.parametrize("name", NAMES, ids=".".join)
def test_no_class_or_function_that_a_batch_may_name_can_be_modified(name: tuple[str, str], state: str) -> None:
    """Python's unpickler runs BUILD with (None, {name: value}) as setattr, even on classes and
    functions.
    """
    states: dict[str, bytes] = {
        "setattr": b"N}" + text("__defaults__") + b"K\x01\x85s\x86",
        "dict": b"}" + text("__doc__") + b"Ns",
        "dtype's": b"(K\x03" + text("|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00t",
        "array's": b"(K\x01K\x00\x85N\x89" + text("") + b"t",
    }
    with pytest.raises(ValueError, match="it sets a state that no array or dtype of a CIFAR batch has"):
        read_batch(b"\x80\x02" + named(*name) + states[state] + b"b.", "data")


def test_the_test_of_modifications_detects_an_unpickler_that_allows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same payload, Python's own unpickler sets the attribute, even if only a batch's
    names are allowed.
    """

    class Restricted(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            assert (module, name) in NAMES
            return super().find_class(module, name)

    function = np.zeros(1).__reduce_ex__(5)[0]
    monkeypatch.setattr(function, "__defaults__", None)
    payload = (
        b"\x80\x02" + named(function.__module__, "_frombuffer") + b"N}" + text("__defaults__") + b"K\x01\x85s\x86b."
    )
    Restricted(io.BytesIO(payload)).load()
    assert function.__defaults__ == (1,), "any caller of numpy's function would be affected"


@pytest.mark.parametrize("name", NAMES, ids=".".join)
def test_functions_in_a_batch_may_be_called_only_as_numpy_calls_them(name: tuple[str, str]) -> None:
    for arguments in (b")", b"K\x01\x85", text("x") * 2 + b"\x86", text("u1") + b"\x85", text("V8") + b"\x89\x88\x87"):
        with pytest.raises(ValueError, match="it calls a function in a way that numpy does not"):
            read_batch(b"\x80\x02" + named(*name) + arguments + b"R.", "data")
    with pytest.raises(ValueError, match="'data' is neither an array of uint8 nor a list of integers"):
        read_batch(b"\x80\x02}" + text("data") + named(*name) + b"s.", "data")


@pytest.mark.parametrize("opcode", [b"i", b"o", b"\x81", b"\x92", b"P", b"Q", b"\x82", b"2", b"0", b"1", b"I", b"\x8b"])
def test_opcodes_that_no_batch_has_are_refused(opcode: bytes) -> None:
    argument = b"1\nx\n" if opcode in b"iPI" else b"\x01\x00\x00\x00\x00"
    with pytest.raises(ValueError, match=r"the opcode \w+ does not belong in a CIFAR batch"):
        read_batch(b"\x80\x02((}}" + opcode + argument + b".", "data")


def bombs() -> dict[str, bytes]:
    many, far = b"\xff\xff\xff\x7f", b"\xff\xff\xff\xff\xff\xff\xff\x7f"
    once = named("_codecs", "encode") + b"q\x00" + text("x" * 100_000) + b"q\x01" + text("latin1") + b"q\x02\x86R"
    dtype = named("numpy", "dtype") + text("u1") + b"\x89\x88\x87R"
    shape = b"J" + many + b"J" + many + b"\x86"
    return {
        "a memo of gigabytes": b"\x80\x02}r" + many + b".",
        "calls that copy": b"\x80\x02]" + once + b"a" + b"h\x00h\x01h\x02\x86Ra" * 3_000 + b".",
        "a dict key of 15,000 tuples in each other": b"\x80\x02})" + b"\x85" * 15_000 + b"Ns.",
        "lists in lists, doubled": b"\x80\x02}" + text("data") + b"]q\x00" + b"](h\x00h\x00eq\x00" * 2_000 + b"s.",
        "a list that holds itself": b"\x80\x02}" + text("data") + b"]q\x00h\x00as.",
        "text of 2 GB": b"\x80\x02X" + many + b"x.",
        "text of exabytes": b"\x80\x04\x8d" + far + b"x.",
        "bytes of exabytes": b"\x80\x04\x8e" + far + b"x.",
        "a bytearray of exabytes": b"\x80\x05\x96" + far + b"x.",
        "a number of 2 GB": b"\x80\x02\x8b" + many + b"x.",
        "an array of exabytes": b"\x80\x05" + named("numpy.core.numeric", "_frombuffer")
        + b"(" + text("x") + dtype + shape + text("C") + b"tR.",
        "marks": b"\x80\x02" + b"(" * 30_000 + b".",
        "dicts": b"\x80\x02" + b"}" * 30_000 + b".",
    }  # fmt: skip


@pytest.mark.parametrize("bomb", bombs())
def test_a_pickle_bomb_is_refused_and_takes_no_more_memory_than_its_size(
    bomb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cifar_batch, "MOST_OPCODES", 20_000)  # keeps the test short
    content = bombs()[bomb]
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r".+"):
            read_batch(content, "data")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 6 << 20, f"used up to {most:,} bytes for a file of {len(content):,} bytes"


def test_an_altered_batch_is_either_read_or_refused_with_a_value_error() -> None:
    seeds, chance = [written_by(writer) for writer in WRITTEN], random.Random(7)
    refused = 0
    for _ in range(1_000):
        content = bytearray(chance.choice(seeds))
        for _ in range(chance.randint(1, 4)):
            head = chance.random() < 0.5
            where = chance.randrange(300) if head else len(content) - 1 - chance.randrange(150)
            content[where] = chance.choice([chance.randrange(256), *b"}](.tRbsauNhq\x85\x86\x87\x93\x94"])
        try:
            read_batch(bytes(content), "data", "labels")
        except ValueError:
            refused += 1
    assert 300 < refused < 1_000


@pytest.mark.parametrize("write", [write_cifar_python, write_cifar_binary])
def test_a_file_larger_than_any_file_of_the_archives_is_refused_unread(write: Any, tmp_path: Path) -> None:
    write(tmp_path)
    path = next(path for path in tmp_path.rglob("data_batch_1*"))
    os.truncate(path, 1 << 40)  # a sparse file, which takes no space
    with pytest.raises(DataError, match=r"data_batch_1\S* has 1,099,511,627,776 bytes, but no file in the archive"):
        open_data(config.load(None, ["data.name=cifar10", f"data.dir={tmp_path}"]).data)

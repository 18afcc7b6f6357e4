"""Every parser of untrusted input survives mutated valid input, and inputs that once broke a
parser.

`python -m benchmarks.fuzz` tries millions of inputs; here each parser gets a hundred.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from functools import cache, partial
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.fuzz import CORPUS
from benchmarks.fuzz.__main__ import replay, table_of
from benchmarks.fuzz.mutate import Form, Mutator
from benchmarks.fuzz.parsers import PARSERS
from benchmarks.fuzz.soak import Result, inputs_of, soak, write_findings
from benchmarks.fuzz.watch import Parser, Target, attempt, warm, watching

INPUTS = 100
FOUND = sorted(CORPUS.glob("*/*"))


@pytest.fixture(scope="module", autouse=True)
def watched() -> Iterator[None]:
    with watching():
        yield


@cache
def made(name: str) -> Target:
    target = PARSERS[name].make()
    warm(target)
    return target


@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_accepts_or_refuses_any_input(name: str) -> None:
    target = made(name)
    for data in islice(inputs_of(PARSERS[name], target, seed=1), INPUTS):
        finding = attempt(target, data).finding
        assert finding is None, f"{finding}: {data[:1000]!r}"


@pytest.mark.parametrize("path", FOUND, ids=[f"{path.parent.name}-{path.name}" for path in FOUND])
def test_an_input_that_once_broke_a_parser_no_longer_does(path: Path) -> None:
    assert attempt(made(path.parent.name), path.read_bytes()).finding is None


def test_each_folder_of_findings_belongs_to_a_parser() -> None:
    assert {path.name for path in CORPUS.iterdir()} <= PARSERS.keys()


# --- the harness itself ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["members", "manifests", "script-indexes", "bucket-listings", "images"])
def test_generated_inputs_depend_only_on_seed_and_number(name: str) -> None:
    parser, target = PARSERS[name], made(name)
    first = list(islice(inputs_of(parser, target, seed=1), 30))
    assert list(islice(inputs_of(parser, target, seed=1, first=10), 20)) == first[10:]
    assert list(islice(inputs_of(parser, target, seed=2), 30)) != first


@pytest.mark.parametrize("form", Form)
def test_every_generator_can_make_inputs_from_any_bytes(form: Form) -> None:
    target = Target(bytes, [b"", b"\xff\x00", b"{", b"\x80\x04.", b"[1]"], ())
    inputs = inputs_of(Parser("any", "", form, lambda: target), target, seed=1)
    assert len({bytes(data) for data in islice(inputs, 200)}) > 10
    assert all(Mutator(form, [seed]) for seed in target.seeds)


def _read_badly(data: bytes) -> None:
    if b"\xff" in data:
        raise KeyError("a field")


def _read_forever(data: bytes) -> None:
    while b"\xff" in data:
        try:
            len(data)
        except Exception:
            continue


def _read_forever_in_c(data: bytes) -> None:
    if b"\xff" in data:
        hashlib.pbkdf2_hmac("sha256", data, b"", 2**31 - 1)


_KEPT: list[bytes] = []


def _read_and_keep(data: bytes) -> None:
    _KEPT.append(bytes(2**16))


def _read_a_bomb(data: bytes) -> None:
    if b"\xff" in data:
        bytearray(2**33)


def _read_a_bomb_and_refuse(data: bytes) -> None:
    try:
        _read_a_bomb(data)
    except MemoryError as error:
        raise ValueError("something is wrong") from error


def _read_and_die(data: bytes) -> None:
    if b"\xff" in data:
        os.abort()


def _read_and_write(data: bytes) -> None:
    if b"\xff" in data:
        Path("/dev/null").write_bytes(data)


DEFECTS = {
    "crash": _read_badly, "hang": _read_forever, "stuck": _read_forever_in_c, "growth": _read_and_keep,
    "memory": _read_a_bomb, "refused bomb": _read_a_bomb_and_refuse, "death": _read_and_die, "act": _read_and_write,
}  # fmt: skip


def _defective(name: str) -> Target:
    return Target(DEFECTS[name], [b"a good input of this parser"], (ValueError,))


def _soak(parser: Parser, rounds: int) -> Result:
    turns = iter(range(rounds))
    [result] = soak([parser], 1, lambda results: next(turns, None) is None, turn=0.1, limit=0.3)
    return result


@pytest.mark.parametrize(
    ("defect", "rounds", "says"),
    [
        ("crash", 1, "crash: KeyError: 'a field' at tests/benchmarks/test_fuzz.py"),
        ("hang", 1, "hang: more than 0.3 s of CPU time at tests/benchmarks/test_fuzz.py"),
        ("stuck", 1, "hang: more than 0.6 s of CPU time in a C function"),
        ("growth", 12, "growth: "),
        ("memory", 1, "memory: more than 4096 MiB at tests/benchmarks/test_fuzz.py"),
        ("refused bomb", 1, "memory: more than 4096 MiB at tests/benchmarks/test_fuzz.py"),
        ("death", 2, "crash: the process has died: SIGABRT"),
        ("act", 1, "act: open ("),
    ],
)
def test_a_deliberate_defect_is_found(defect: str, rounds: int, says: str, tmp_path: Path) -> None:
    result = _soak(Parser(defect, "a defect", Form.BYTES, partial(_defective, defect)), rounds)
    finding = next(iter(result.findings.values()))[1]
    assert str(finding).startswith(says)
    [(count, _, path), *_] = write_findings(result, tmp_path)
    assert count >= 1 and (path is None or b"\xff" in path.read_bytes() or finding.kind == "growth")
    assert f"| {defect} | a defect | {result.inputs:,} |" in table_of([result])


def test_a_correct_parser_has_no_findings() -> None:
    result = _soak(Parser("good", "", Form.BYTES, _good), 12)
    assert result.findings == {} and result.inputs > 100 and 0 < result.refused < result.inputs


def _good() -> Target:
    return Target(int, [b"12"], (ValueError,))


def test_an_input_can_be_replayed_from_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser, path = Parser("crash", "a defect", Form.BYTES, partial(_defective, "crash")), tmp_path / "input"
    path.write_bytes(b"\xff")
    assert replay(path, parser, 5.0) == 1 and "crash: KeyError: 'a field'" in capsys.readouterr().out
    path.write_bytes(b"")
    assert replay(path, parser, 5.0) == 0 and "accepted" in capsys.readouterr().out

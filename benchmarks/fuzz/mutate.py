"""Makes hostile inputs from good ones, reproducibly.

The mutator is our own. atheris (libFuzzer) finds new paths by coverage, but makes a Python parser
many times slower, ends the process at the first finding, and has wheels only for Linux on x86-64.
hypothesis generates inputs from descriptions, which the hand-written parsers here do not have. If
there is a description (manifests, reports), tests/unit/test_any_manifest.py and
tests/unit/engine/test_any_report.py use hypothesis.

Changed bytes would rarely get past `json.loads`, so most changes are made to an input's parts: the
values of JSON, the words of a text, the opcodes of a pickle.
"""

from __future__ import annotations

import io
import json
import pickletools
import random
import re
from collections.abc import Callable
from enum import Enum
from typing import Any

_Reader = Callable[[bytes], Any]
LONGEST = 64 * 1024
"""Maximum size of an input in bytes."""
_COUNTS = (1, 1, 2, 3, 8)
"""Possible numbers of changes to an input, one of which is drawn."""
_RAW = 0.2
"""The share of inputs whose bytes are changed regardless of their form."""
_BYTES = [
    b"", b"\x00", b"\xff", b"\xff\xff\xff\xff", b"\xff\xfe", b"\xed\xa0\x80", b"\\ud800", b"NaN", b"Infinity",
    b"1e999", b"-0", b"-1", b"1.5", b"9" * 400, b"9" * 5000, b"0x" + b"f" * 5000, b"18446744073709551616", b"null",
    b"true", b"[]", b"{}", b'""', b"\x1b[31m", b"<script>", b"[" * 500, b'{"a":' * 300, b"[" * 20_000, b"\r\n\r\n",
    b":", b"%00", b"../", b"/etc/passwd", b"\xe2\x80\xae", b"&a ", b"*a", b"!!", b"<<: ", b"\t", b"\n", b"1:30",
    b"__class__", b"__setstate__", b"<!DOCTYPE a>", b"&lt;", b"Transfer-Encoding: chunked\r\n",
]  # fmt: skip
_NUMBERS = [0, 1, -1, 2, 2**31, 2**53, 2**62, 2**63, 2**64, -(2**63), 10**30, 10**400, 1.5, -0.0, 1e308]
_VALUES: list[Any] = [
    None, True, False, *_NUMBERS, float("nan"), float("inf"), "", "x", "x" * 5000, "\ud800", "\x00", "\u202e",
    "\x1b[2J", "../../x", "/x", "0.1", "1e999", "nan", "2026-01-01T00:00:00Z", "9999-12-31T23:59:59.999Z", [], {},
    [[]], [{}], [None], {"a": 1}, ["a"] * 2000, [0] * 300,
]  # fmt: skip
_KEYS = ["", "t", "a", "name", "spec", "__class__", "x" * 300, "\ud800", "\x00"]
# pickle: a 20 kB int, then memo without end, build, reduce, a class from the stack, a persistent
# id, opened lists.
_OPCODES = [
    b"\x8b\x20\x4e\x00\x00" + b"\x7f" * 20_000, b"\x94", b"b", b"R", b"\x81", b"\x93", b"Q", b"(", b"]", b"}", b"N",
    b"0", b"2", b"s", b"u", b"e", b"a", b"\x85", b"\x86", b"\x87", b"h\x00", b"j\xff\xff\xff\x7f", b"r\xff\xff\xff\x7f",
    b"cbuiltins\neval\n", b"cos\nsystem\n", b"cpathlib\nPosixPath\n", b"cnumpy\ndtype\n", b"cnumpy\nndarray\n",
    b"X\x08\x00\x00\x00__dict__", b"X\xff\xff\xff\x7f", b"\x8e" + b"\xff" * 7 + b"\x0f", b"K\x05", b"I01\n", b".",
]  # fmt: skip


class Form(Enum):
    """The kind of an input's parts."""

    BYTES = "bytes"
    TEXT = "words of a text"
    JSON = "values of a JSON document"
    LINES = "lines of JSON"
    PICKLE = "opcodes of a pickle"


class Mutator:
    """Makes changed copies of `seeds`. A seed that does not have the form is changed as bytes."""

    def __init__(self, form: Form, seeds: list[bytes]) -> None:
        self._seeds = seeds
        split: _Reader | None = {Form.TEXT: _words, Form.PICKLE: _opcodes}.get(form)
        tokens = [] if split is None else [_read(split, seed) for seed in seeds]
        self._tokens: list[list[bytes]] = [found for found in tokens if found]
        self._special = _OPCODES if form is Form.PICKLE else _BYTES
        loads: dict[Form, _Reader] = {Form.JSON: json.loads, Form.LINES: _lines}
        load = loads.get(form)
        self._is_lines = form is Form.LINES
        values = [] if load is None else [_read(load, seed) for seed in seeds]
        self._values = [(value, _count(value)) for value in values if value is not None]
        self._rows = [row for value, _ in self._values for row in value if self._is_lines] or [None]
        self._parts = [part for value, _ in self._values for part in _parts_of(value)]

    def make(self, rng: random.Random) -> bytes:
        """Return one input."""
        if rng.random() < _RAW or not (self._tokens or self._values):
            return self._changed_bytes(rng)[:LONGEST]
        if self._tokens:
            return self._changed_tokens(rng)[:LONGEST]
        value, size = rng.choice(self._values)
        if self._is_lines:
            rows = [self._changed(rng, row, rng.choice(_COUNTS) / size) for row in self._rearranged(rng, value)]
            return b"\n".join(map(_dumped, rows))[:LONGEST]
        return _dumped(self._changed(rng, value, rng.choice(_COUNTS) / size))[:LONGEST]

    def _changed_bytes(self, rng: random.Random) -> bytes:
        made = bytearray(rng.choice(self._seeds))
        for _ in range(rng.choice(_COUNTS)):
            kind, at = rng.randrange(6), rng.randrange(len(made) + 1)
            end = min(len(made), at + rng.randrange(1, 60))
            if kind == 0 and made:
                made[at % len(made)] = rng.randrange(256)
            elif kind == 1:
                made[at:at] = rng.choice(_BYTES)
            elif kind == 2:
                del made[at:end]
            elif kind == 3:
                other = rng.choice(self._seeds)
                start = rng.randrange(len(other) + 1)
                made[at:at] = other[start : start + rng.randrange(80)]
            elif kind == 4:
                made[at:end] = rng.choice(_BYTES)
            else:
                made[at:at] = made[at:end] * rng.randrange(1, 5)
        return bytes(made)

    def _changed_tokens(self, rng: random.Random) -> bytes:
        made = list(rng.choice(self._tokens))
        for _ in range(rng.choice(_COUNTS)):
            kind, at = rng.randrange(5), rng.randrange(len(made) + 1)
            end = min(len(made), at + rng.randrange(1, 6))
            if kind == 0:
                del made[at:end]
            elif kind == 1:
                made[at:at] = [rng.choice(self._special)]
            elif kind == 2:
                made[at:end] = [rng.choice(self._special)]
            elif kind == 3:
                other = rng.choice(self._tokens)
                start = rng.randrange(len(other))
                made[at:at] = other[start : start + rng.randrange(1, 12)]
            else:
                made[at:at] = made[at:end] * rng.choice((1, 1, 1, 30))
        return b"".join(made)

    def _rearranged(self, rng: random.Random, rows: list[Any]) -> list[Any]:
        made = list(rows)
        for _ in range(rng.choice((0, 0, 1, 2, 5))):
            kind, at = rng.randrange(3), rng.randrange(len(made) + 1)
            if kind == 0:
                del made[at : at + 1]
            elif kind == 1:
                made[at:at] = made[at : at + rng.choice((1, 1, 2, 5))]
            else:
                made[at:at] = [rng.choice(self._rows)]
        return made

    def _changed(self, rng: random.Random, value: Any, share: float) -> Any:
        """Return the value with some parts replaced, removed or added at random."""
        if rng.random() < share:
            return self._instead(rng, value)
        if isinstance(value, dict):
            made = {k: self._changed(rng, v, share) for k, v in value.items() if rng.random() >= share / 3}
            if rng.random() < share / 2:
                made[rng.choice(_KEYS)] = self._instead(rng, None)
            return made
        if isinstance(value, list):
            items = [self._changed(rng, item, share) for item in value]
            return items * rng.choice((0, 2, 40)) if rng.random() < share / 2 else items
        return value

    def _instead(self, rng: random.Random, value: Any) -> Any:
        kind = rng.randrange(4)
        if kind == 0:
            return rng.choice(self._parts)
        if kind == 1 and isinstance(value, str):
            at = rng.randrange(len(value) + 1)
            return value[:at] + str(rng.choice(_VALUES))[:5000] + value[at:]
        if kind == 1 and isinstance(value, int | float):
            return value + rng.choice((-1, 1)) if rng.random() < 0.5 else rng.choice(_NUMBERS)
        return rng.choice(_VALUES)


def _read(read: Callable[[bytes], Any], seed: bytes) -> Any:
    try:
        return read(seed)
    except (ValueError, RecursionError):
        return None


def _words(text: bytes) -> list[bytes]:
    return re.findall(rb"\w+|[^\S\n]+|.", text, re.DOTALL)


def _opcodes(content: bytes) -> list[bytes]:
    starts = [position or 0 for _, _, position in pickletools.genops(io.BytesIO(content))]
    return [content[start:end] for start, end in zip(starts, [*starts[1:], len(content)], strict=True)]


def _lines(text: bytes) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


def _dumped(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=True).encode()


def _count(value: Any) -> int:
    return sum(1 for _ in _parts_of(value))


def _parts_of(value: Any) -> list[Any]:
    """Return the value and everything in it."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value, *(part for item in inside for part in _parts_of(item))]

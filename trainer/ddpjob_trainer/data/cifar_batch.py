"""Reads a file of CIFAR's python version, which is a pickle, without Python's unpickler.

A pickle is a program for a stack machine. With Python's machine, a file can import names, call
them, set attributes (the opcode BUILD with a pair is `setattr`, even on a class) and choose the
size of the machine's memo. The machine in this module interprets only the opcodes that Python 2.7
to 3.13 write, in protocols 2 to 5, for a dict of strings, lists of integers and arrays from numpy 1
and 2. A name in the file remains a name: nothing is imported or called, and no attribute is set.
The few calls that numpy writes are turned into descriptions of an array:

    REDUCE  numpy.dtype("u1", False, True)                -> a dtype, "u1" or "i8" only
    BUILD   it with (3, "|", None, None, None, -1, -1, 0) -> checked, and dropped
    REDUCE  _reconstruct(numpy.ndarray, (0,), b"b")       -> an array without content
    BUILD   it with (1, shape, dtype, is_fortran, content)
    REDUCE  _frombuffer(content, dtype, shape, "C")       -> an array, as protocol 5 writes it
    REDUCE  _codecs.encode(text, "latin1")                -> bytes, as Python 3 writes them in protocol 2

Only the two fields that are read are converted or copied, and only at the end. If the machine
converted contents immediately, a small file could fill the memory by repeating a conversion. Memory
use is bounded by the file's size and its number of opcodes.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

MOST_BYTES = 320 << 20
"""Maximum size of a batch file in bytes. The largest valid file is CIFAR-100's training set, which
has 155 MB, or twice as much if Python 3 wrote it in protocol 2.
"""
MOST_OPCODES = 2_000_000
"""Maximum number of opcodes in a batch; the largest batch has about 300,000."""

_DTYPES = {"u1": "|", "i8": "<"}
"""Maps each supported element type, by numpy's name, to the byte order that the file must state."""
_LATIN1 = "latin1"


@dataclass(frozen=True)
class _Name:
    """A class or function named in the file."""

    text: str


@dataclass(frozen=True)
class _Encoded:
    """Bytes that the file stores as Latin-1 text."""

    text: str


@dataclass(frozen=True)
class _Dtype:
    code: str


@dataclass
class _Array:
    """An array in the file.

    The opcode BUILD sets the layout and content of an existing array. `content` has one character
    or byte for each byte of the array.
    """

    shape: tuple[int, ...] | None = None
    dtype: _Dtype = _Dtype("u1")
    order: Any = "C"
    content: str | bytes | bytearray = b""

    def fill(self, shape: Any, dtype: Any, order: Any, content: Any) -> _Array:
        """Set the layout and content that the file states.

        Raises ValueError if one of them is invalid, or if the content does not fit the layout.
        """
        content = content.text if isinstance(content, _Encoded) else content
        if not isinstance(shape, tuple) or len(shape) > 2 or not all(type(side) is int and side >= 0 for side in shape):
            raise ValueError("an array does not have one or two dimensions")
        if not isinstance(dtype, _Dtype) or order not in ("C", "F"):
            raise ValueError("an array has no dtype or an unknown order")
        if not isinstance(content, (str, bytes, bytearray)) or len(content) != _bytes_of(shape, dtype):
            raise ValueError("the length of an array's content does not match its shape")
        self.shape, self.dtype, self.order, self.content = shape, dtype, order, content
        return self


def _bytes_of(shape: tuple[int, ...], dtype: _Dtype) -> int:
    count = int(dtype.code[1])
    for side in shape:
        count *= side
    return count


def read_batch(content: bytes, *keys: str) -> list[npt.NDArray[Any]]:
    """Return the arrays that the pickled dict contains under `keys`.

    A list of integers becomes an array of int64. If `content` is not a CIFAR batch, raises a
    ValueError whose message is the reason.
    """
    try:
        found = _run(content)
    except (IndexError, KeyError) as error:
        raise ValueError(f"it reads a value that it has not stored ({type(error).__name__})") from error
    if not isinstance(found, dict):
        raise ValueError("it is not a dict")
    if missing := [key for key in keys if key not in found]:
        raise ValueError(f"it has no {missing[0]!r}")
    return [_values(found[key], key) for key in keys]


def _values(found: Any, key: str) -> npt.NDArray[Any]:
    if isinstance(found, list) and all(type(value) is int for value in found):
        try:
            return np.array(found, dtype=np.int64)
        except OverflowError:
            raise ValueError(f"{key!r} contains a number of more than 64 bits") from None
    if not isinstance(found, _Array) or found.shape is None:
        raise ValueError(f"{key!r} is neither an array of uint8 nor a list of integers")
    raw = found.content.encode(_LATIN1) if isinstance(found.content, str) else found.content
    return np.frombuffer(raw, np.dtype(found.dtype.code).newbyteorder("<")).reshape(found.shape, order=found.order)


def _run(content: bytes) -> Any:
    """Execute the opcodes of a pickle, and return the resulting object.

    Raises ValueError, IndexError, KeyError.
    """
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has {len(content):,} bytes; the limit is {MOST_BYTES:,}")
    machine = _Machine()
    for number, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if opcode.name == "STOP":
            break
        if number >= MOST_OPCODES:
            raise ValueError(f"it has more than {MOST_OPCODES:,} opcodes")
        machine.step(opcode.name, argument)
    return machine.stack[-1]


class _Machine:
    """The stack machine: its stack, the positions of marks on the stack, and the memo."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        """Execute one opcode.

        Raises ValueError for an opcode that does not occur in batches. Raises IndexError or
        KeyError if the opcode reads a value that the file has not stored before.
        """
        stack = self.stack
        match name:
            case "BININT1" | "BININT2" | "BININT" | "LONG1":
                stack.append(argument)
            case "SHORT_BINSTRING" | "BINSTRING" | "SHORT_BINUNICODE" | "BINUNICODE":
                stack.append(argument)
            case "SHORT_BINBYTES" | "BINBYTES" | "BYTEARRAY8":
                stack.append(argument)
            case "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = stack[-1]
            case "MEMOIZE":
                self._memo[len(self._memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
            case "MARK":
                self._marks.append(len(stack))
            case "EMPTY_LIST" | "EMPTY_DICT" | "EMPTY_TUPLE":
                stack.append({"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}[name]())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(self._take_from(len(stack) - int(name[-1]))))
            case "TUPLE":
                stack.append(tuple(self._since_mark()))
            case "APPEND" | "APPENDS":
                _extend(list, self._since_mark() if name == "APPENDS" else [stack.pop()], stack)
            case "SETITEM" | "SETITEMS":
                _extend(dict, self._since_mark() if name == "SETITEMS" else self._take_from(len(stack) - 2), stack)
            case "GLOBAL":
                stack.append(_name(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                stack.append(_name(*self._take_from(len(stack) - 2)))
            case "REDUCE":
                function, arguments = self._take_from(len(stack) - 2)
                stack.append(_call(function, arguments))
            case "BUILD":
                state = stack.pop()
                _build(stack[-1], state)
            case "PROTO" | "FRAME":
                pass
            case _:
                raise ValueError(f"the opcode {name} does not belong in a CIFAR batch")

    def _since_mark(self) -> list[Any]:
        return self._take_from(self._marks.pop())

    def _take_from(self, start: int) -> list[Any]:
        """Remove and return the stack's items from position `start` on. Raises IndexError."""
        if not 0 <= start <= len(self.stack):
            raise IndexError
        taken = self.stack[start:]
        del self.stack[start:]
        return taken


def _extend(kind: type[list[Any]] | type[dict[Any, Any]], items: list[Any], stack: list[Any]) -> None:
    """Add `items` to the list or dict on top of the stack. Raises ValueError, IndexError."""
    target = stack[-1]
    if not isinstance(target, kind):
        raise ValueError(f"it adds items to something that is not a {kind.__name__}")
    if isinstance(target, list):
        target.extend(items)
        return
    keys, values = items[::2], items[1::2]
    if len(keys) != len(values) or not all(isinstance(key, str) for key in keys):
        # Only strings are accepted as keys, because hashing a deeply nested tuple would overflow
        # C's stack.
        raise ValueError("it has a dict with a key that is not a string")
    target.update(zip(keys, values, strict=True))


_NAMES = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy.core.numeric", "_frombuffer"),
    ("numpy._core.numeric", "_frombuffer"),
    ("_codecs", "encode"),
}


def _name(module: Any, name: Any) -> _Name:
    if not isinstance(module, str) or not isinstance(name, str):
        raise ValueError("it has a name that is not a string")
    if (module, name) not in _NAMES:
        raise ValueError(f"{module[:80]}.{name[:80]} does not belong in a CIFAR batch")
    return _Name(name)


def _call(function: Any, arguments: Any) -> Any:
    """Return the object that a function call in the file stands for. Raises ValueError."""
    if isinstance(function, _Name) and isinstance(arguments, tuple):
        match function.text, arguments:
            case "dtype", (str(code), *flags) if code in _DTYPES and flags == [False, True]:
                return _Dtype(code)
            case "_reconstruct", (_Name("ndarray"), (0,), "b" | b"b" | _Encoded("b")):
                return _Array()
            case "_frombuffer", (content, dtype, shape, order):
                return _Array().fill(shape, dtype, order, content)
            case "encode", (str(text), "latin1"):
                return _Encoded(text)
    raise ValueError("it calls a function in a way that numpy does not, or its arrays are not uint8")


def _build(target: Any, state: Any) -> None:
    """Apply a state from the file: check the state of a dtype, or fill an array.

    Raises ValueError.
    """
    match target, state:
        case _Dtype(code), (3, order, None, None, None, -1, -1, 0) if order == _DTYPES[code]:
            return
        case _Array(shape=None), (1, shape, dtype, bool(is_fortran), content):
            target.fill(shape, dtype, "F" if is_fortran else "C", content)
            return
    raise ValueError("it sets a state that no array or dtype of a CIFAR batch has")

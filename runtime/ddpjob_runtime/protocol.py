"""Words, numbers, lines and the report that the coordinator, launchers and operator share.

docs/protocol.md describes how they are used. This module needs only the standard library of Python
3.9 or later, because it runs in users' images.
"""

# ruff: noqa: UP045  (the types of records are evaluated, and Python 3.9 cannot evaluate `X | None`)

from __future__ import annotations

import hashlib
import hmac
import json
import re
import typing
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields, replace
from datetime import datetime, timezone
from enum import Enum
from functools import cache, partial
from itertools import islice
from typing import Any, Optional, Union

VERSION = 1
"""Version of this protocol and of how pods start the runtime. A job whose pods use a different
version gets a new generation."""
NUMBERS_PER_ATTEMPT = 1_000_000
"""The coordinator of attempt A numbers its rounds and incidents from 1 + A * NUMBERS_PER_ATTEMPT,
because the coordinators of a generation cannot communicate, but must not use a number twice."""


class Word(str, Enum):
    """A protocol string. It formats as its value in every version of Python."""

    __str__ = str.__str__
    __format__ = str.__format__  # type: ignore[assignment]


# --- exit codes of the launcher; any other code counts as a failure of the node

EXIT_DONE = 0
EXIT_STEPPED_ASIDE = 75
"""Exit code of a worker that saved a checkpoint because it was asked to stop."""
EXIT_RENDEZVOUS_LOST = 76
EXIT_STOPPED = 77
EXIT_INIT_FAILURE = 78
EXIT_FENCED = 79
"""The round continued without this node."""
EXIT_UNFIT = 80
"""The node has failed spec.preflight."""


# --- modes, states and kinds


class Mode(Word):
    """spec.recovery.mode."""

    STANDARD = "Standard"
    FAST = "Fast"


class Hangs(Word):
    """spec.recovery.hangs: what happens after a proven hang."""

    END = "End"
    REPORT = "Report"


class WaitKind(Word):
    """The reason why a worker waits, according to the kernel."""

    STOPPED = "stopped"
    TRACED = "traced"
    STORAGE = "storage"
    SERVER = "server"
    ASLEEP = "asleep"


class CoordinatorState(Word):
    """The state of a job's group."""

    FORMING = "Forming"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUCCEEDED = "Succeeded"
    STOPPED = "Stopped"


class MemberState(Word):
    """The state of one member.

    `LOST` is never reported, because lost members are listed in `Report.lost`.
    """

    STARTING = "Starting"
    READY = "Ready"
    RUNNING = "Running"
    FINISHED = "Finished"
    LEAVING = "Leaving"
    LOST = "Lost"


class IncidentKind(Word):
    """The first cause of a break, as the coordinator sees it."""

    WORKER_FAILED = "WorkerFailed"
    OOM_KILLED = "OOMKilled"
    HANG = "Hang"
    INIT_FAILURE = "InitFailure"
    PEER_LOST = "PeerLost"
    LEFT = "Left"
    JOINED = "Joined"


COLD_WORKERS = "ColdWorkers"
"""Note kind: a node's workers are not forked from a process that has imported torch."""
PREFLIGHT = "Preflight"
"""Note kind: what the node with rank 0 measured when checking the links."""
DATA = "Data"
"""Note kind: how much of storage.data.url or code.archive a node has fetched; empty when done."""
MOST_CODE_BYTES = 2 * 2**30
"""Maximum size of code.archive in bytes."""
MOST_UNPACKED_BYTES = 8 * 2**30
"""Maximum total size of the files in code.archive in bytes."""
MOST_CODE_FILES = 50_000
"""Maximum number of files and folders in code.archive."""
COMMUNICATION_ERROR = re.compile(
    r"Connection (closed|reset|aborted|refused)|Dist(Backend|Network|Store)Error|\bgloo\b|\bNCCL\b|ProcessGroup|"
    r"Broken pipe|Socket Timeout|remote process exited|peer closed|TCPStore|recvValue|Timed out (after|waiting)|"
    r"\bRDMA\b|(?<![a-z])UCC(?![a-z])|\bMPI\b|\bHorovodInternalError\b|\bHorovod has been shut down\b|\btensorpipe\b",
    re.I,
)
"""Errors that a rank raises when its peer is gone. The pattern is applied to the exception's
message, but not to its traceback, because source lines might name a backend."""
RANK_FAILURE = "RankFailed"
"""Kind of the termination message that a rank writes if a `command` runs torchrun (worker.py)."""

RANK_ENDED = "(this rank has ended)"
"""Replaces the stacks of a rank whose process is gone."""
RANK_FAILED = "(this rank has failed, and its process has not ended) "
"""Precedes a rank's error in the first line of its stacks. The rank's process is waiting for one of
its threads or a device."""
DATA_WAITS = "waiting for another pod of this node, which is fetching the data"
"""Text of a waiting pod's DATA note. The fetching pod's note has the details."""


# --- lines between members and the coordinator


class FromMember(Word):
    """Verbs of the lines that a member sends."""

    CHALLENGE = "challenge"
    HELLO = "hello"
    READY = "ready"
    JOINED = "joined"
    FAILURE = "failure"
    FINISHED = "finished"
    LEAVING = "leaving"
    INIT_FAILURE = "init_failure"
    STACKS = "stacks"
    LOOKED = "looked"
    NEIGHBOUR = "neighbour"
    NOTE = "note"
    REPLACED = "replaced"
    HEARTBEAT = "hb"


class ToMember(Word):
    """Verbs of the lines that the coordinator sends."""

    PROOF = "proof"
    WELCOME = "welcome"
    REFUSED = "refused"
    GO = "go"
    RESTART = "restart"
    DUMP = "dump"
    LOOK = "look"
    DONE = "done"
    STOP = "stop"
    RECORD = "record"
    ERROR = "error"
    HEARTBEAT = "hb"


HEARTBEAT_SECONDS = 1.0
SILENCE_SECONDS = 6.0
"""A connection that has been silent for this long counts as dead."""
RECONNECT_SECONDS = 30.0
"""How long a member in Standard mode continues without its coordinator, which might only be
suspended. Workers need the coordinator's store only for a new round. When the coordinator has
ended, the operator replaces all pods. In Fast mode, a member continues as long as its workers run.
A member without workers waits as long as it waits for its first coordinator.
"""

MAX_LINE = 256 * 1024
MAX_LOOKS = 96 * 1024
"""Maximum number of characters of a member's stacks in one check, for all its ranks together."""
MAX_RANKS = 1024
"""Maximum number of ranks of one member."""
MAX_TEXT = 4096
MAX_TRACEBACK = 32 * 1024
MAX_NOTE = 1000
MAX_KIND = 100
"""Maximum length of a note's kind."""
MAX_SIGNAL = 20
MAX_NAME = 253
"""Maximum length of a pod name, as in Kubernetes."""
MAX_REASON = 300
"""Maximum length of the reason why a member was lost."""
MAX_INCIDENTS = 50
MAX_NOTES = 100
"""Maximum number of notes in a report. There are few kinds, and each pod has at most one note of
each kind."""
DETAILED_INCIDENTS = 10
"""Number of newest incidents that the operator keeps with tracebacks; a status
shows at most this number of incidents."""
MAX_TOLD, MAX_TOLD_BEFORE, MAX_STACKS = 3000, 200, 6000
"""Maximum number of characters that the operator keeps of three strings: a detailed incident's
message and traceback, an older incident's message, and an overdue step's stacks. The pods' logs
have them in full.
"""
MAX_REPORT = 1024 * 1024
"""Maximum size of a report in bytes, for any number of pods."""
MAX_TEXTS = 96 * 1024
"""Maximum size in bytes of a report without its pods."""
ROUNDS_FILE = ".ddpjob-rounds.jsonl"
"""File in the checkpoint folder in which a member records rounds and breaks, one per line. It is
hidden, because scripts assume that the newest or last visible file there is their checkpoint."""
LOGS_FOLDER, OLDER = ".ddpjob-logs", ".1"
"""Folder in the checkpoint folder or bucket with the ends of pods' logs, and the suffix of a file
with older lines."""
MAX_KEPT_LOG = 1 << 20
"""Maximum size of a pod's kept log in bytes, in all of its files."""
MAX_RECORDED = 5
"""Maximum number of incidents in a RECORD line, which the coordinator keeps shorter than half of
MAX_LINE, because a line over MAX_LINE would end the connection.
"""
MAX_SPARES = 100
MAX_PODS = 1024 + MAX_SPARES
"""Maximum number of pods in one job: its nodes and spares."""
MAX_NUMBER = 2**62
"""Largest whole number that a member may send. A status can hold 63 bits, so round
numbers have room to grow beyond this number.
"""
MAX_SECONDS = 2**31
"""Longest time in seconds that a member or the operator may send."""
MAX_FIGURES = 100
"""Maximum number of entries in a progress report and in its metrics, and maximum length of their
names."""
STRAGGLERS = "stragglers"
"""Key of a progress report: the lagging ranks, `[{"rank": 3, "slowdown": 1.8, "cost": 0.4}]`."""
MAX_STRAGGLERS = 8
ROUND = "round"
"""Key of a progress report: the sender's round, GENERATION.ROUND as in a worker's DDPJOB_FENCE."""
UNGROUPED = "ungrouped"
"""Key of the step counter's reports: true if the program takes steps without having formed a group
with the other ranks.
"""
UNCOUNTABLE = "uncountable"
"""Key of the step counter's reports: true if the counter might miss the next steps, as it does with
a compiled optimizer."""
EXCHANGING = "exchanging"
"""Key of the step counter's reports: true if the ranks exchanged data in each of the first steps.
"""
FLAGS = (UNGROUPED, UNCOUNTABLE, EXCHANGING)
RESUMED = "resumed"
"""Key of the step counter's reports: one of RESUMED_WORDS. It shows whether the optimizer had a
checkpoint's state before its first step.
"""
RESUMED_WORDS = YES, NO, UNKNOWN = "yes", "no", "unknown"
START = "start"
"""Key of a progress report: where this round's training continued, as `read_start` returns it."""
ENVIRONMENT = "environment"
"""Key of a progress report: what rank 0 trains with, as `read_environment` returns it."""
MAX_PACKAGES = 20
_PACKAGE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,39}")
_PRINTABLE = re.compile(r"[ -~]{1,80}")
SOURCES = MEMORY, STORAGE, SCRATCH = "memory", "storage", "scratch"
"""Where the state came from."""
AT_RISK = "stepsAtRisk"
"""Figure of a progress report: how many steps at most would be repeated after a loss."""
SNAPSHOT_BYTES = "snapshotBytes"
"""Figure of a progress report: the number of bytes that two states need. It is sent if a node does
not have enough room for them.
"""
COUNTED_SPEED = "stepsPerSecond"
"""The step counter's only metric. It is used if a script does not report samples per second."""
CHECKPOINT_TIME = "checkpointTime"
"""Metric that reports when a script's newest checkpoint was completely on disk, in Unix seconds."""
COPY_STEP, COPY_TIME, COPY_BEHIND = "copyStep", "copyTime", "copyBehind"
"""Metrics of copies in a bucket: the newest copy's step, when it was saved (Unix seconds), and how
many seconds a checkpoint has existed only on its machine, without any upload. Reports with only
these metrics are sent in the background, so they do not show that the script is taking steps.
"""


def encode(verb: str, **values: Any) -> bytes:
    """Return one line, ready to send."""
    return _line(dict(values, t=verb)) if values else _bare(verb)


@cache
def _bare(verb: str) -> bytes:
    """Return a line without fields.

    Cached, because a thousand members send a thousand heartbeats per second.
    """
    return _line({"t": verb})


def _line(message: dict[str, Any]) -> bytes:
    return (json.dumps(message, separators=(",", ":")) + "\n").encode()


def decode(line: bytes) -> dict[str, Any]:
    """Return the object in one line.

    Raises:
        ValueError: not a JSON object with a verb; the message shows the line.
    """
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a line of JSON: {error}: {line[:80]!r}") from None
    if not isinstance(message, dict) or not isinstance(message.get("t"), str):
        raise ValueError(f'a line must be a JSON object with a verb under "t", not {line[:80]!r}')
    return message


def clip(text: object, limit: int = MAX_TEXT) -> str:
    """Shorten the string to `limit` characters by leaving out its middle.

    The middle is the least useful part, because messages begin with the error, and tracebacks end
    with it. The cuts fall between lines, unless the lines there are long.
    """
    full = "" if text is None else str(text)
    if len(full) <= limit:
        return full
    head = min(200, limit // 4)
    first, last = full[:head], full[-(limit - head - 3) :]
    if "\n" in first and 0 <= last.find("\n") < min(_PART_OF_A_LINE, limit // 3):
        return f"{first[: first.rindex(_NEWLINE)]}\n...{last[last.index(_NEWLINE) :]}"
    return f"{first}...{last}"


_PART_OF_A_LINE = 300
"""Maximum number of additional characters to omit so that a shortened string continues with a whole
line."""
_NEWLINE = "\n"


def last_lines(text: str, limit: int) -> str:
    """Return the last `limit` characters of the string.

    If a line begins shortly after the cut, the result starts with that line.
    """
    text = text.strip()
    last = text[-limit:]
    whole = last.find("\n") + 1 if len(text) > limit else 0
    return last[whole:] if whole <= min(_PART_OF_A_LINE, limit // 3) else last


def error_mark(message: str, traceback: str) -> tuple[str, str]:
    """Return the parts that are the same in all occurrences of one error.

    The parts are the message's first line and the script's last line in the traceback (empty if
    there is none). Digits are removed from the first line, because they may name a rank.
    """
    lines = _FRAME.findall(traceback)
    return _DIGITS.sub("#", message.partition(_NEWLINE)[0]), lines[-1] if lines else ""


_FRAME = re.compile(r'^ *(File ".*", line [0-9]+)', re.MULTILINE)
_DIGITS = re.compile(r"[0-9]+")
_BEYOND_16_BITS = re.compile("[\U00010000-\U0010ffff]")


def clip_kept(text: str, limit: int) -> str:
    """Shorten the string to `limit` characters that take at most `2 * limit` bytes in Python.

    A single character beyond 16 bits, such as an emoji, makes every character of a string take four
    bytes. So if the string is longer than half the limit, such characters are replaced.
    """
    text = clip(text, limit)
    return text if text.isascii() or len(text) <= limit // 2 else _BEYOND_16_BITS.sub("\N{REPLACEMENT CHARACTER}", text)


# --- who knows the job's token


def seal(token: str, *parts: str | bytes) -> str:
    """Return a proof that the sender knows the token.

    The proof is the hexadecimal HMAC-SHA256 of the parts.
    """
    mac = hmac.new(token.encode(), digestmod=hashlib.sha256)
    for part in parts:
        data = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        mac.update(b"%d:" % len(data) + data)
    return mac.hexdigest()


def is_sealed(proof: Any, token: str, *parts: str | bytes) -> bool:
    """Whether `proof` is the seal of these parts."""
    return isinstance(proof, str) and hmac.compare_digest(
        proof.encode(errors="surrogatepass"), seal(token, *parts).encode()
    )


# --- HTTP

HEALTH_PATH, STATUS_PATH, METRICS_PATH = "/healthz", "/status", "/metrics"
INSTANCE_HEADER, NONCE_HEADER, PROOF_HEADER = "DDPJob-Instance", "DDPJob-Nonce", "DDPJob-Proof"
"""The coordinator's random number, the request's nonce, and the seal. A request's seal covers
`"request", INSTANCE, NONCE, METHOD, PATH with query, BODY`, and a response's seal covers
`"answer", INSTANCE, NONCE, BODY`."""
MAX_NONCE = 100


class Command(Word):
    """Requests that change something: `POST /v1/NAME`, sealed with the job's token."""

    PROGRESS = "progress"
    GONE = "gone"
    LEAVE = "leave"
    SIZE = "size"
    PATIENCE = "patience"
    ORDER = "order"
    STOP = "stop"
    EXIT = "exit"

    @property
    def path(self) -> str:
        """The path of the request."""
        return f"/v1/{self}"


def kept_log_name(pod: str, uid: str) -> str:
    """Return the name of a pod's kept log.

    The name contains the beginning of the job's UID, because a later job with the same name has
    pods with the same names.
    """
    return f"{pod}.{(re.sub('[^0-9a-f]', '', uid) + '0' * 8)[:8]}.log"


_KEPT_LOG = re.compile(
    rf"([a-z0-9][-a-z0-9.]{{0,{MAX_NAME - 1}}})\.([0-9a-f]{{8}})\.log(?:{re.escape(OLDER)})?", re.ASCII
)


def read_kept_log(name: str) -> Optional[tuple[str, str]]:
    """Return (pod, beginning of the job's UID) of a kept log's file name; None for other names."""
    match = _KEPT_LOG.fullmatch(name)
    return (match[1], match[2]) if match else None


def order_mark(pods: Iterable[str]) -> str:
    """Return the mark of a pod order, as used in the report.

    The sender of an order recognizes its own order by this mark. Without an order, the mark is
    empty.
    """
    names = "\n".join(pods)
    return hashlib.sha256(names.encode(errors="surrogatepass")).hexdigest()[:16] if names else ""


# --- the report


def time_of(unix_seconds: float) -> datetime:
    """Convert Unix seconds to a time in UTC."""
    return datetime.fromtimestamp(unix_seconds, timezone.utc)


def iso(moment: datetime) -> str:
    """Format a time as ISO 8601 in UTC with milliseconds."""
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03d}Z"


def log_line(moment: datetime, who: str, text: str) -> str:
    """Format a line that the launcher ("ddpjob") or the coordinator logs."""
    return f"{iso(moment)} {who}: {text}"


OWN_LOG_LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (?:ddpjob|coordinator): (?!ends with [1-9])")
"""Matches the beginning of a line of `log_line`, unless it is the launcher's last line after a
failure, `ends with CODE`, which describes only the launcher's own end."""


def largest_report(pods: int) -> int:
    """Return the maximum size in bytes of a report for a job with `pods` pods, including spares.

    The coordinator, which does not know the number of spares, allows MAX_TEXTS and the actual size
    of the lists of members, which is less.
    """
    return min(MAX_REPORT, MAX_TEXTS + 64 * 1024 + 1024 * pods)


class Record:
    """A dataclass that is written as a JSON object, in which field `min_nodes` becomes key
    `minNodes`."""

    @classmethod
    def read(cls: type[R], body: Any, where: str = "report") -> R:
        """Read a record from JSON. Unknown keys are ignored; keys with a default may be missing.

        Raises:
            ValueError: the message names the key and states the rule.
        """
        if not isinstance(body, dict):
            raise ValueError(f"{where}: must be an object, not {body!r:.80}")
        values = {}
        for name, key, read, required in _layout(cls):
            if key in body:
                values[name] = read(body[key], f"{where}.{key}")
            elif required:
                raise ValueError(f"{where}.{key}: missing")
        return cls(**values)

    def write(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        return {key: _write(getattr(self, name)) for name, key, *_ in _layout(type(self))}


R = typing.TypeVar("R", bound=Record)
Read = Callable[[Any, str], Any]
"""Converts a JSON value, given its path. Raises a ValueError that names the path."""


def _layout_of(cls: Any) -> tuple[tuple[str, str, Read, bool], ...]:
    """Return (name, key, reader, whether it is required) of each field of a record."""
    kinds = typing.get_type_hints(cls)
    return tuple(
        (
            f.name,
            _key(f.name),
            _reader(kinds[f.name], f.metadata.get("most", MAX_TEXT)),
            f.default is MISSING and f.default_factory is MISSING,
        )
        for f in fields(cls)
    )


_layout: Callable[[Any], tuple[tuple[str, str, Read, bool], ...]] = cache(_layout_of)


def _at_most(most: int, default: Any) -> Any:
    """Return a field with a default, whose value may have at most `most` entries or characters."""
    return field(default=default, metadata={"most": most})


def _key(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(other.capitalize() for other in others)


def _write(value: Any) -> Any:
    if isinstance(value, Record):
        return value.write()
    if isinstance(value, tuple):
        return [_write(item) for item in value]
    return iso(value) if isinstance(value, datetime) else value


def _reader(kind: Any, most: int) -> Read:
    """Return the reader for a type, with at most `most` entries or characters.

    Called once per field, because `_layout` is cached.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Union:  # it is Optional
        there = _reader(arguments[0], most)
        return lambda value, where: None if value is None else there(value, where)
    if origin is tuple:
        return partial(_read_list, _reader(arguments[0], most), most)
    if origin is dict:
        return read_figures
    if issubclass(kind, Record):
        nested: Read = kind.read
        return nested
    if kind is str:
        return lambda value, where: clip_kept(_read_text(kind, value, where), most)
    return partial(_READERS[Word if issubclass(kind, Word) else kind], kind)


def _read_list(read: Read, most: int, value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{where}: must be a list, not {value!r:.80}")
    if len(value) > most:
        raise ValueError(f"{where}: must have at most {most} entries, not {len(value)}")
    return tuple([read(item, f"{where}[{number}]") for number, item in enumerate(value)])


def read_figures(value: Any, where: str) -> dict[str, Any]:
    """Return the named figures and the figures in `metrics`, without other values.

    Raises:
        ValueError: the value is not an object.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{where}: must be an object, not {value!r:.80}")
    figures = _figures(value)
    if isinstance(value.get("metrics"), dict):
        figures["metrics"] = _figures(value["metrics"])
    if stragglers := read_stragglers(value.get(STRAGGLERS)):
        figures[STRAGGLERS] = stragglers
    if start := read_start(value.get(START)):
        figures[START] = start
    if environment := read_environment(value.get(ENVIRONMENT)):
        figures[ENVIRONMENT] = environment
    figures.update((name, True) for name in FLAGS if value.get(name) is True)
    return figures


def read_start(value: Any) -> dict[str, Any]:
    """Return where training continued; empty if the value is malformed.

    Training continued after step `step`, from one of SOURCES (`source`). `made` is the last step
    completed before the restart; it is missing if unknown. `seconds` is the time until step `made`
    was complete again; it is missing while that step has not been repeated.
    """
    if not isinstance(value, dict) or value.get("source") not in SOURCES or not _is_count(value.get("step")):
        return {}
    found = {"step": value["step"], "source": value["source"]}
    if _is_count(value.get("made")):
        found["made"] = max(value["made"], value["step"])
    seconds = value.get("seconds")
    if seconds is not None and is_number(seconds) and 0 <= seconds <= MAX_SECONDS:
        found["seconds"] = seconds
    return found


def read_environment(value: Any) -> dict[str, Any]:
    """Return `gpu` (a model) and `packages` (versions by name). Malformed parts are dropped.

    Strings are printable ASCII of at most 80 characters, so that they can be shown anywhere.
    """
    found: dict[str, Any] = {}
    if not isinstance(value, dict):
        return found
    if _is_printable(value.get("gpu")):
        found["gpu"] = value["gpu"]
    given = value.get("packages")
    kept = {
        name: version
        for name, version in islice(given.items() if isinstance(given, dict) else (), MAX_PACKAGES)
        if isinstance(name, str) and _PACKAGE.fullmatch(name) and _is_printable(version)
    }
    return {**found, "packages": kept} if kept else found


def _is_printable(value: Any) -> bool:
    return isinstance(value, str) and _PRINTABLE.fullmatch(value) is not None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_NUMBER


def read_stragglers(value: Any) -> list[dict[str, Any]]:
    """Return the lagging ranks without duplicates. Malformed entries and costs are dropped."""
    found: dict[int, dict[str, Any]] = {}
    for item in value[:MAX_STRAGGLERS] if isinstance(value, list) else []:
        if not isinstance(item, dict) or not is_number(item.get("slowdown")) or item["slowdown"] < 1:
            continue
        rank = item.get("rank")
        if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < 2**31:
            cost = item.get("cost", -1)
            known = {"cost": cost} if is_number(cost) and 0 <= cost <= 1 else {}
            found.setdefault(rank, {"rank": rank, "slowdown": item["slowdown"], **known})
    return list(found.values())


def _figures(value: dict[str, Any]) -> dict[str, Any]:
    known = ((name, item) for name, item in value.items() if len(name) <= MAX_FIGURES and _is_figure(item))
    return {_kept_figure(name): _kept_figure(item) for name, item in islice(known, MAX_FIGURES)}


def _kept_figure(value: Any) -> Any:
    return clip_kept(value, MAX_FIGURES) if isinstance(value, str) else value


def _is_figure(value: Any) -> bool:
    return value is None or is_number(value) or (isinstance(value, str) and len(value) <= MAX_FIGURES)


def awaited_figures(progress: dict[str, Any]) -> frozenset[str]:
    """Return the figures among step (or epoch), loss and speed that the progress has.

    Users wait for the first value of each.
    """
    metrics = progress.get("metrics")
    counted = isinstance(metrics, dict) and COUNTED_SPEED in metrics
    has = {
        "step": progress.get("step") or progress.get("epoch"),
        "loss": progress.get("loss") is not None,
        "speed": progress.get("samplesPerSecond") is not None or counted,
    }
    return frozenset(name for name, there in has.items() if there)


def progress_news(progress: dict[str, Any]) -> frozenset[str]:
    """Return marks for the parts of a progress report that are urgent when they first appear.

    The marks stand for the report's awaited figures, the step counter's flags, and the fields of
    START.
    """
    start = progress.get(START) or {}
    flags = {name for name in FLAGS if progress.get(name)}
    return awaited_figures(progress) | flags | {f"{START}.{name}" for name in start}


def is_number(value: Any) -> bool:
    """Whether `value` is a finite number of at most 64 bits, as the status requires.

    JSON's true does not count as a number.
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def whole_number(value: Any, name: str, least: int = 0, most: int = MAX_NUMBER) -> int:
    """Return the value if it is a whole number within these bounds.

    Raises a ValueError that names the field.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name}: must be a whole number from {least} to {most}, not {value!r:.80}")
    return value


def _read_number(kind: Any, value: Any, where: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        raise ValueError(f"{where}: must be a {'whole ' if kind is int else ''}number, not {value!r:.80}")
    if not -(2**63) <= value < 2**63:  # also excludes NaN and infinities, which the status cannot hold
        raise ValueError(f"{where}: must be a finite number of at most 64 bits, not {value!r:.80}")
    return value


def _read_bool(kind: Any, value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{where}: must be true or false, not {value!r:.80}")
    return value


def _read_text(kind: Any, value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: must be a string, not {value!r:.80}")
    return escaped(value)


def escaped(text: str) -> str:
    """Escape lone surrogates, as in file names that are not UTF-8, because APIs reject them."""
    return text.encode(errors="backslashreplace").decode()


def _read_word(kind: Any, value: Any, where: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"{where}: must be one of {', '.join(kind)}, not {value!r:.80}") from None


_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.(?:\d{3}|\d{6}))Z", re.ASCII)


def _read_time(kind: Any, value: Any, where: str) -> datetime:
    try:
        # strptime is ten times slower, and a report contains a dozen timestamps.
        return datetime.fromisoformat(_TIME.fullmatch(value)[1] + "+00:00")  # type: ignore[index]
    except (TypeError, ValueError):
        raise ValueError(f"{where}: must be a time like 2026-01-31T23:59:59.000Z, not {value!r:.80}") from None


_READERS = {
    bool: _read_bool,
    int: _read_number,
    float: _read_number,
    str: _read_text,
    Word: _read_word,
    datetime: _read_time,
}


@dataclass(frozen=True)
class Member(Record):
    """A connected launcher. `rank` is its group rank in the current round."""

    pod: str = field(metadata={"most": MAX_NAME})
    state: MemberState
    index: int = 0
    attempt: int = 0
    rank: Optional[int] = None
    round: Optional[int] = None


@dataclass(frozen=True)
class LostMember(Record):
    """A member whose connection has ended and whose index is still free.

    `since` is when it last sent something.
    """

    pod: str = field(metadata={"most": MAX_NAME})
    since: datetime
    index: int = 0
    why: str = _at_most(MAX_REASON, "")


@dataclass(frozen=True)
class Note(Record):
    """Information about a pod for the operator, for example that its workers are started cold."""

    pod: str = field(metadata={"most": MAX_NAME})
    kind: str = field(metadata={"most": MAX_KIND})
    why: str = field(metadata={"most": MAX_NOTE})


@dataclass(frozen=True)
class Incident(Record):
    """One break of the group and its first cause."""

    id: int
    time: datetime
    kind: IncidentKind
    pod: Optional[str] = _at_most(MAX_NAME, None)
    index: Optional[int] = None
    rank: Optional[int] = None
    local_rank: Optional[int] = None
    exit_code: Optional[int] = None
    signal: Optional[str] = _at_most(MAX_SIGNAL, None)
    message: str = ""
    traceback: str = _at_most(MAX_TRACEBACK, "")
    consequences: int = 0
    backoff_seconds: float = 0.0
    """How long the coordinator waits before the next round."""
    alike_ranks: int = 0
    """Number of ranks with the same `error_mark`; 0 if some rank failed on its own with a different
    error."""
    alike_pods: int = 0
    """Number of pods that these ranks were in."""
    group_rank: Optional[int] = None
    """Group rank of a node whose workers all ended with exit code 0 before other nodes' workers."""

    def short(self, traceback: int = MAX_TEXT) -> Incident:
        """Return a copy with at most `traceback` characters of the traceback.

        The message is shortened, too."""
        trace = clip(self.traceback, traceback) if traceback else ""
        return replace(self, message=clip(self.message, 500), traceback=trace)


def shortened(incidents: tuple[Incident, ...], detailed: int = DETAILED_INCIDENTS) -> tuple[Incident, ...]:
    """Return the incidents, with texts shortened to what the operator keeps.

    Only the newest `detailed` incidents keep their tracebacks.
    """
    older = len(incidents) - detailed
    return tuple(
        replace(
            incident,
            message=clip_kept(incident.message, MAX_TOLD_BEFORE if number < older else MAX_TOLD),
            traceback="" if number < older else clip_kept(last_lines(incident.traceback, MAX_TOLD), MAX_TOLD),
        )
        for number, incident in enumerate(incidents)
    )


@dataclass(frozen=True)
class Recovery(Record):
    """How the job recovers.

    `last_seconds` is the time from the last break to the next step. `down_since` is when the group
    stopped taking steps.
    """

    last_seconds: Optional[float] = None
    down_since: Optional[datetime] = None


@dataclass(frozen=True)
class RankLook(Record):
    """The activity of one rank between two checks, and its position.

    `text` is a part of the stack, and `digest` a hash of the whole stack. In the `seconds` since
    the last check, the worker's session used `cpu` seconds of CPU time and transferred `bytes`
    through files and sockets, and `forks` of its processes began or ended. `wait` and `call` come
    from the kernel.
    """

    rank: int
    text: str = field(metadata={"most": MAX_TRACEBACK})
    digest: str = field(metadata={"most": MAX_FIGURES})
    seconds: float
    cpu: float
    bytes: float
    forks: int = 0
    gpu: bool = False
    """Whether the worker uses a GPU. Waits for a GPU take CPU time."""
    wait: Optional[WaitKind] = None
    call: str = _at_most(MAX_FIGURES, "")


@dataclass(frozen=True)
class Overdue(Record):
    """An overdue step. The group has not completed a step since `since`.

    `where` says where the ranks are, and `traceback` has their stacks.
    """

    since: datetime
    where: str
    traceback: str = _at_most(MAX_TRACEBACK, "")
    activity: str = _at_most(MAX_FIGURES, "")
    """The script's activity according to its report."""


@dataclass(frozen=True)
class Report(Record):
    """The coordinator's response to `GET /status`."""

    generation: int
    state: CoordinatorState
    nodes: int
    """Number of members that a round should have; `min_nodes` are enough."""
    min_nodes: int
    backoff: tuple[float, ...] = field(metadata={"most": 2})
    """Initial and longest back-off delay in a crash loop, in seconds."""
    now: Optional[datetime] = None
    """The coordinator's clock, to which the report's times refer."""
    news: int = 0
    """Increases with every change other than progress."""
    mode: Mode = Mode.STANDARD
    attempt: int = 0
    hang_after: Optional[float] = None
    hangs: Hangs = Hangs.END
    world: Optional[int] = None
    """Number of members in the current round."""
    round: int = 0
    members: tuple[Member, ...] = _at_most(MAX_PODS, ())
    lost: tuple[LostMember, ...] = _at_most(MAX_PODS, ())
    incidents: tuple[Incident, ...] = _at_most(MAX_INCIDENTS, ())
    """The latest incidents, oldest first."""
    backoff_until: Optional[datetime] = None
    notes: tuple[Note, ...] = _at_most(MAX_NOTES, ())
    progress: dict[str, Any] = field(default_factory=dict)
    recovery: Recovery = Recovery()
    overdue: Optional[Overdue] = None
    """Set only if `hang_after` is None; otherwise an overdue step is an incident."""
    order: str = _at_most(MAX_FIGURES, "")
    """`order_mark` of the pod order that determines the ranks; empty if ranks follow the indices.
    """

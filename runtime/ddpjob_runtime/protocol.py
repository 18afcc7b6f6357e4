"""Defines the messages, the report and the constants with which coordinator, launchers and operator
communicate.

docs/protocol.md describes the protocol. This module runs in users' images, so it needs only Python
3.9 or later and the standard library.
"""

# ruff: noqa: UP045 (record types are evaluated, and Python 3.9 cannot evaluate `X | None`)

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
"""Version of this protocol, including how pods start the runtime. If a job's pods use a different
version, the job gets a new generation.
"""
NUMBERS_PER_ATTEMPT = 1_000_000
"""The coordinator of attempt A numbers its rounds and incidents from 1 + A * NUMBERS_PER_ATTEMPT. A
number must not be used twice in a generation, and a new coordinator cannot ask its predecessor
which numbers are taken.
"""


class Word(str, Enum):
    """A string of the protocol. In every version of Python, `str` and `format` return its value."""

    __str__ = str.__str__
    __format__ = str.__format__  # type: ignore[assignment]


# --- exit codes of the launcher; any other code counts as a failure of the node

EXIT_DONE = 0
EXIT_STEPPED_ASIDE = 75
"""Exit code of a worker that was asked to stop and has ended after saving a checkpoint."""
EXIT_RENDEZVOUS_LOST = 76
EXIT_STOPPED = 77
EXIT_INIT_FAILURE = 78
EXIT_FENCED = 79
"""The launcher was fenced: the round continued without its node."""
EXIT_UNFIT = 80
"""The node has failed the checks in spec.preflight."""


# --- modes, states and kinds


class Mode(Word):
    """The values of spec.recovery.mode."""

    STANDARD = "Standard"
    FAST = "Fast"


class Hangs(Word):
    """The values of spec.recovery.hangs: what to do once a hang is proven."""

    END = "End"
    REPORT = "Report"


class WaitKind(Word):
    """What a worker is waiting for, according to the kernel."""

    STOPPED = "stopped"
    TRACED = "traced"
    STORAGE = "storage"
    SERVER = "server"
    ASLEEP = "asleep"


class CoordinatorState(Word):
    """The state of a job's group as reported by the coordinator."""

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
    """The kind of an incident: what first caused the break, in the coordinator's view."""

    WORKER_FAILED = "WorkerFailed"
    OOM_KILLED = "OOMKilled"
    HANG = "Hang"
    INIT_FAILURE = "InitFailure"
    PEER_LOST = "PeerLost"
    LEFT = "Left"
    JOINED = "Joined"


COLD_WORKERS = "ColdWorkers"
"""Kind of a note: this node's workers are started cold. They are not forked from a process that has
already imported torch.
"""
PREFLIGHT = "Preflight"
"""Kind of a note: the results of the link check, as measured by the node with rank 0."""
DATA = "Data"
"""Kind of a note: how much of storage.data.url or code.archive a node has fetched so far. The
note's text is empty once the node has fetched everything.
"""
MOST_CODE_BYTES = 2 * 2**30
"""Maximum size of code.archive in bytes."""
MOST_UNPACKED_BYTES = 8 * 2**30
"""Maximum total size of code.archive's files after unpacking, in bytes."""
MOST_CODE_FILES = 50_000
"""Maximum number of files and folders in code.archive."""
COMMUNICATION_ERROR = re.compile(
    r"Connection (closed|reset|aborted|refused)|Dist(Backend|Network|Store)Error|\bgloo\b|\bNCCL\b|ProcessGroup|"
    r"Broken pipe|Socket Timeout|remote process exited|peer closed|TCPStore|recvValue|Timed out (after|waiting)|"
    r"\bRDMA\b|(?<![a-z])UCC(?![a-z])|\bMPI\b|\bHorovodInternalError\b|\bHorovod has been shut down\b|\btensorpipe\b",
    re.I,
)
"""Matches errors that a rank raises when its peer is gone. Apply it only to an exception's message.
A traceback quotes source lines, and these might contain the name of a backend.
"""
RANK_FAILURE = "RankFailed"
"""The `kind` in the termination message of a failed rank. Only ranks that a `command` starts with
torchrun write this message (see worker.py).
"""

RANK_ENDED = "(this rank has ended)"
"""Replaces the stacks of a rank whose process has ended."""
RANK_FAILED = "(this rank has failed, and its process has not ended) "
"""Precedes a failed rank's error in the first line of its stacks. The process of such a rank still
exists, because it waits for one of its threads or for a device.
"""
DATA_WAITS = "waiting for another pod on this Kubernetes node, which is fetching the data"
"""Text of a pod's DATA note while another pod on the same host fetches the data. The note of that
other pod has the details.
"""


# --- lines between members and the coordinator


class FromMember(Word):
    """Verbs of the lines that a member sends to the coordinator."""

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
    """Verbs of the lines that the coordinator sends to a member."""

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
"""A connection counts as dead if nothing has been received on it for this many seconds."""
RECONNECT_SECONDS = 30.0
"""How many seconds a Standard-mode member continues after losing its connection to the coordinator.
The coordinator might only be suspended, and the workers do not need its store until the next round.
If the coordinator has ended, the operator replaces all pods.

In Fast mode, a member continues for as long as its workers run. A member without workers waits for
a new coordinator as long as it would wait for the first one.
"""

MAX_LINE = 256 * 1024
MAX_LOOKS = 96 * 1024
"""Maximum number of characters in the stacks that a member sends for one check. The limit applies
to the stacks of all its ranks together.
"""
MAX_RANKS = 1024
"""Maximum number of ranks per member."""
MAX_TEXT = 4096
MAX_TRACEBACK = 32 * 1024
MAX_NOTE = 1000
MAX_KIND = 100
"""Maximum length of a note's kind in characters."""
MAX_SIGNAL = 20
MAX_NAME = 253
"""Maximum length of a pod name, as in Kubernetes."""
MAX_REASON = 300
"""Maximum length in characters of the reason for a member's loss."""
MAX_INCIDENTS = 50
MAX_NOTES = 100
"""Maximum number of notes in a report. The coordinator leaves out any more than that. There are few
kinds of notes, and a pod has at most one note of each kind.
"""
DETAILED_INCIDENTS = 10
"""Number of latest incidents whose tracebacks the operator keeps. A status shows no more incidents
than this.
"""
MAX_TOLD, MAX_TOLD_BEFORE, MAX_STACKS = 3000, 200, 6000
"""The operator shortens texts to these numbers of characters. MAX_TOLD applies to the message and
the traceback of a detailed incident, MAX_TOLD_BEFORE to the message of an older incident, and
MAX_STACKS to the stacks of an overdue step. The pods' logs contain the complete texts.
"""
MAX_REPORT = 1024 * 1024
"""Maximum size of a report in bytes, however many pods the job has."""
MAX_TEXTS = 96 * 1024
"""Maximum size in bytes of a report, not counting its lists of pods."""
ROUNDS_FILE = ".ddpjob-rounds.jsonl"
"""Name of the file in the checkpoint folder where a member records rounds and breaks, one per line.
The file is hidden from scripts that take the newest or the last visible file in that folder to be
their checkpoint.
"""
LOGS_FOLDER, OLDER = ".ddpjob-logs", ".1"
"""LOGS_FOLDER is a folder inside the checkpoint folder or bucket. It keeps the last part of each
pod's log. OLDER is the suffix of the file that contains the older lines of such a log.
"""
MAX_KEPT_LOG = 1 << 20
"""Maximum total size in bytes of the files in which one pod's log is kept."""
MAX_RECORDED = 5
"""Maximum number of incidents in a RECORD line. The coordinator also keeps the line below half of
MAX_LINE, because a line longer than MAX_LINE would end the connection.
"""
MAX_SPARES = 100
MAX_PODS = 1024 + MAX_SPARES
"""Maximum number of pods in a job, both nodes and spares."""
MAX_NUMBER = 2**62
"""Largest whole number that a member may send. The status can hold 63-bit numbers, which leaves
room for a round number to grow beyond this limit.
"""
MAX_SECONDS = 2**31
"""Longest time in seconds that a member or the operator may send."""
MAX_FIGURES = 100
"""Maximum number of entries in a progress report, and in its `metrics`. It is also the maximum
number of characters in an entry's name.
"""
STRAGGLERS = "stragglers"
"""Key in a progress report for the lagging ranks, `[{"rank": 3, "slowdown": 1.8, "cost": 0.4}]`."""
MAX_STRAGGLERS = 8
ROUND = "round"
"""Key in a progress report for the sender's round. The value is GENERATION.ROUND, as in a worker's
DDPJOB_FENCE.
"""
UNGROUPED = "ungrouped"
"""Key in the step counter's reports. The value is true if the program takes steps without having
formed a process group with the other ranks.
"""
UNCOUNTABLE = "uncountable"
"""Key in the step counter's reports. The value is true if the counter might miss the next steps, as
with a compiled optimizer.
"""
EXCHANGING = "exchanging"
"""Key in the step counter's reports. The value is true if the ranks exchanged data in each of the
first steps after step 1.
"""
FLAGS = (UNGROUPED, UNCOUNTABLE, EXCHANGING)
RESUMED = "resumed"
"""Key in the step counter's reports: whether a checkpoint was loaded into the optimizer before its
first step. The value is one of RESUMED_WORDS.
"""
RESUMED_WORDS = YES, NO, UNKNOWN = "yes", "no", "unknown"
START = "start"
"""Key in a progress report for the point from which this round's training continued: its step, and
the source of the state at that step. `read_start` describes the value.
"""
ENVIRONMENT = "environment"
"""Key in a progress report for rank 0's GPU and the versions of its packages. `read_environment`
describes the value.
"""
MAX_PACKAGES = 20
_PACKAGE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,39}")
_PRINTABLE = re.compile(r"[ -~]{1,80}")
SOURCES = MEMORY, STORAGE, SCRATCH = "memory", "storage", "scratch"
"""Possible sources of the state from which training continues."""
AT_RISK = "stepsAtRisk"
"""Figure in a progress report: how many steps would be repeated, at most, if a node were lost now.
"""
SNAPSHOT_BYTES = "snapshotBytes"
"""Figure in a progress report: the size in bytes of two training states. It is sent only if a node
does not have enough memory for both of them.
"""
COUNTED_SPEED = "stepsPerSecond"
"""The only metric that the step counter sends. If a script does not report samples per second, this
metric is shown as its speed.
"""
CHECKPOINT_TIME = "checkpointTime"
"""Metric from a script: the Unix time at which its latest checkpoint was completely on disk."""
COPY_STEP, COPY_TIME, COPY_BEHIND = "copyStep", "copyTime", "copyBehind"
"""Metrics about the copies of checkpoints in a bucket. COPY_STEP is the step of the latest copy,
and COPY_TIME is the Unix time at which that checkpoint was saved. COPY_BEHIND is how many seconds a
checkpoint has existed only on its machine, without a completed upload.

Reports with only these metrics come from the background, so they do not show that the script is
taking steps.
"""


def encode(verb: str, **values: Any) -> bytes:
    """Return a message as one line, ready to send."""
    return _line(dict(values, t=verb)) if values else _bare(verb)


@cache
def _bare(verb: str) -> bytes:
    """Return the line for a message that has only a verb.

    The lines are cached because a thousand members send a thousand heartbeats per second in total.
    """
    return _line({"t": verb})


def _line(message: dict[str, Any]) -> bytes:
    return (json.dumps(message, separators=(",", ":")) + "\n").encode()


def decode(line: bytes) -> dict[str, Any]:
    """Parse a line into a message, which is a JSON object with a verb.

    Raises: ValueError: the line is something else; the error's message shows the line.
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

    The middle is the least useful part: messages begin with the error, and tracebacks end with it.
    Whole lines are left out where possible.
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
"""Maximum number of extra characters that `clip` and `last_lines` leave out to avoid partial lines.
"""
_NEWLINE = "\n"


def last_lines(text: str, limit: int) -> str:
    """Return the last `limit` characters of the string.

    If these characters begin in the middle of a line, and the next line begins soon after, the
    partial line is left out.
    """
    text = text.strip()
    last = text[-limit:]
    whole = last.find("\n") + 1 if len(text) > limit else 0
    return last[whole:] if whole <= min(_PART_OF_A_LINE, limit // 3) else last


def error_mark(message: str, traceback: str) -> tuple[str, str]:
    """Return what all occurrences of the same error have in common.

    The first part of the result is the first line of the message. Its digits are replaced, because
    they may be the number of a rank. The second part is the last file and line in the traceback;
    empty if there is no traceback.
    """
    lines = _FRAME.findall(traceback)
    return _DIGITS.sub("#", message.partition(_NEWLINE)[0]), lines[-1] if lines else ""


_FRAME = re.compile(r'^ *(File ".*", line [0-9]+)', re.MULTILINE)
_DIGITS = re.compile(r"[0-9]+")
_BEYOND_16_BITS = re.compile("[\U00010000-\U0010ffff]")


def clip_kept(text: str, limit: int) -> str:
    """Shorten the string to `limit` characters that take at most `2 * limit` bytes in memory.

    A single character beyond 16 bits, such as an emoji, makes Python store every character of a
    string in four bytes. Such characters are therefore replaced if the string is longer than half
    of `limit`.
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
"""Names of three HTTP headers. They contain the coordinator's random number, the request's nonce,
and the seal. The seal of a request covers `"request", INSTANCE, NONCE, METHOD, PATH with query,
BODY`. The seal of a response covers `"answer", INSTANCE, NONCE, BODY`.
"""
MAX_NONCE = 100


class Command(Word):
    """Requests that change something in the coordinator.

    Each request is a `POST /v1/NAME` and carries a seal made with the job's token.
    """

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
        """The path of the request's URL."""
        return f"/v1/{self}"


def kept_log_name(pod: str, uid: str) -> str:
    """Return the file name of a pod's kept log.

    The pod's name is not enough, because the pods of a later job can have the same names. The file
    name therefore also contains the beginning of the job's UID.
    """
    return f"{pod}.{(re.sub('[^0-9a-f]', '', uid) + '0' * 8)[:8]}.log"


_KEPT_LOG = re.compile(
    rf"([a-z0-9][-a-z0-9.]{{0,{MAX_NAME - 1}}})\.([0-9a-f]{{8}})\.log(?:{re.escape(OLDER)})?", re.ASCII
)


def read_kept_log(name: str) -> Optional[tuple[str, str]]:
    """Parse the file name of a kept log; return None for any other name.

    The result is the pod's name and the beginning of the job's UID.
    """
    match = _KEPT_LOG.fullmatch(name)
    return (match[1], match[2]) if match else None


def order_mark(pods: Iterable[str]) -> str:
    """Return a short hash that identifies an order of the pods; empty if there is no order.

    The sender of an order compares this hash with the one in the report, to see whether the
    coordinator has that order.
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


OWN_LOG_LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (?:ddpjob|coordinator): (?!exits with code [1-9])")
"""Matches the beginning of a line written by `log_line`, with one exception: `exits with code
CODE`. The launcher logs that line last, after a failure, and it describes only the launcher's own
exit.
"""


def largest_report(pods: int) -> int:
    """Return the maximum size in bytes of a report for a job with `pods` pods, including spares.

    The coordinator does not know how many spares there are. It limits its reports to MAX_TEXTS plus
    the actual size of the lists of members, and that sum is always below the maximum returned here.
    """
    return min(MAX_REPORT, MAX_TEXTS + 64 * 1024 + 1024 * pods)


class Record:
    """A dataclass that can be written as a JSON object.

    The JSON keys are the field names in camel case. For example, the `min_nodes` field becomes
    `minNodes`.
    """

    @classmethod
    def read(cls: type[R], body: Any, where: str = "report") -> R:
        """Read a record from a JSON object.

        Unknown keys are ignored. A key may be missing if its field has a default.

        Raises: ValueError: the object is invalid; the message names the key and states the rule.
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
"""A function that converts a JSON value. Its second argument is the value's path in the report. If
the value is invalid, the function raises a ValueError that names the path.
"""


def _layout_of(cls: Any) -> tuple[tuple[str, str, Read, bool], ...]:
    """Return a tuple (name, key, reader, is required) for each field of a record."""
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
    """Return a field with a default and a maximum number of entries or characters."""
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
    """Return the function that reads a field of type `kind`.

    `most` is the maximum number of entries of a list, or of characters of a string. This function
    is called only once per field, because `_layout` is cached.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Union:  # The records use Union only for Optional fields.
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
    """Return the valid figures of a progress report and of its `metrics`; drop all other values.

    Raises: ValueError: the report is not an object.
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
    """Return the point from which this round's training continued; empty if the value is malformed.

    `step` is the step after which training continued, and `source`, one of SOURCES, is where the
    state at that step came from. `made` is the last step that was completed before the restart;
    missing if unknown. `seconds` is how long training took to complete step `made` again; missing
    until then.
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
    """Return the GPU's model as `gpu`, and a dict of package versions as `packages`.

    Malformed parts are dropped. Every string is at most 80 characters of printable ASCII, so it can
    be shown anywhere.
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
    """Return the lagging ranks without duplicates.

    A malformed entry is dropped. If only its cost is malformed, the entry is kept without the cost.
    """
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
    """Return the names of the awaited figures that a progress report contains.

    Users wait for the first value of "step" (or epoch), "loss" and "speed".
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
    """Return one mark for each part of a progress report that is urgent when it first appears.

    Such a part is a figure that users wait for, a flag that the step counter has set, or a field of
    START.
    """
    start = read_start(progress.get(START))
    flags = {name for name in FLAGS if progress.get(name)}
    return awaited_figures(progress) | flags | {f"{START}.{name}" for name in start}


def is_number(value: Any) -> bool:
    """Whether `value` is a finite number of at most 64 bits, as the status requires.

    A JSON `true` does not count as a number.
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def whole_number(value: Any, name: str, least: int = 0, most: int = MAX_NUMBER) -> int:
    """Return the value if it is a whole number from `least` to `most`.

    Raises a ValueError that names the field.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name}: must be a whole number from {least} to {most}, not {value!r:.80}")
    return value


def _read_number(kind: Any, value: Any, where: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        raise ValueError(f"{where}: must be a {'whole ' if kind is int else ''}number, not {value!r:.80}")
    # This check also excludes NaN and infinities, which the status cannot hold.
    if not -(2**63) <= value < 2**63:
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
    """Escape lone surrogates, because APIs reject strings that contain them.

    Python uses lone surrogates to represent file names that are not valid UTF-8.
    """
    return text.encode(errors="backslashreplace").decode()


def _read_word(kind: Any, value: Any, where: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"{where}: must be one of {', '.join(kind)}, not {value!r:.80}") from None


_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.(?:\d{3}|\d{6}))Z", re.ASCII)


def _read_time(kind: Any, value: Any, where: str) -> datetime:
    try:
        # strptime would be ten times slower, and a report contains a dozen timestamps.
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
    """A launcher that is connected to the coordinator.

    `rank` is the group rank of the member in the current round.
    """

    pod: str = field(metadata={"most": MAX_NAME})
    state: MemberState
    index: int = 0
    attempt: int = 0
    rank: Optional[int] = None
    round: Optional[int] = None


@dataclass(frozen=True)
class LostMember(Record):
    """A member whose connection has ended and whose index no other member has taken.

    `since` is when the coordinator last received anything from the member.
    """

    pod: str = field(metadata={"most": MAX_NAME})
    since: datetime
    index: int = 0
    why: str = _at_most(MAX_REASON, "")


@dataclass(frozen=True)
class Note(Record):
    """Information for the operator about a pod, for example that its workers are started cold."""

    pod: str = field(metadata={"most": MAX_NAME})
    kind: str = field(metadata={"most": MAX_KIND})
    why: str = field(metadata={"most": MAX_NOTE})


@dataclass(frozen=True)
class Incident(Record):
    """A break of the group, and its first cause."""

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
    """How long the coordinator waits after this break before starting the next round."""
    alike_ranks: int = 0
    """Number of ranks that failed with the same `error_mark`; 0 if a rank failed with a different
    error that is not a consequence.
    """
    alike_pods: int = 0
    """Number of pods that contained the ranks counted by `alike_ranks`."""
    group_rank: Optional[int] = None
    """Group rank of the node whose workers all ended with exit code 0 while other nodes still had
    workers.
    """

    def short(self, traceback: int = MAX_TEXT) -> Incident:
        """Return a copy with a shorter message and at most `traceback` characters of traceback."""
        trace = clip(self.traceback, traceback) if traceback else ""
        return replace(self, message=clip(self.message, 500), traceback=trace)


def shortened(incidents: tuple[Incident, ...], detailed: int = DETAILED_INCIDENTS) -> tuple[Incident, ...]:
    """Return the incidents with their texts shortened to the lengths that the operator keeps.

    Only the latest `detailed` incidents keep their tracebacks.
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
    """Measurements of the job's recovery.

    `last_seconds` is the time from the last break to the first step after that break. `down_since`
    is when the group stopped taking steps; None while the group is taking steps.
    """

    last_seconds: Optional[float] = None
    down_since: Optional[datetime] = None


@dataclass(frozen=True)
class RankLook(Record):
    """What a rank has done since the last check for a hang, and where it is now.

    `text` is part of the rank's stack, and `digest` is a hash of the whole stack. `seconds` is the
    time since the last check. `cpu`, `bytes` and `forks` cover that time and all processes in the
    worker's session: the CPU time in seconds, the bytes transferred through files and sockets, and
    the number of processes that began or ended. `wait` and `call` describe what the worker is
    waiting for, according to the kernel.
    """

    rank: int
    text: str = field(metadata={"most": MAX_TRACEBACK})
    digest: str = field(metadata={"most": MAX_FIGURES})
    seconds: float
    cpu: float
    bytes: float
    forks: int = 0
    gpu: bool = False
    """Whether the worker uses a GPU. Such a worker uses CPU time even while it is only waiting for
    the GPU.
    """
    wait: Optional[WaitKind] = None
    call: str = _at_most(MAX_FIGURES, "")


@dataclass(frozen=True)
class Overdue(Record):
    """A step that is overdue. The group has not completed a step since the time `since`.

    `where` describes where the ranks are, and `traceback` contains their stacks.
    """

    since: datetime
    where: str
    traceback: str = _at_most(MAX_TRACEBACK, "")
    activity: str = _at_most(MAX_FIGURES, "")
    """What the script reported that it was doing."""


@dataclass(frozen=True)
class Report(Record):
    """The coordinator's response to `GET /status`."""

    generation: int
    state: CoordinatorState
    nodes: int
    """Number of members that a round should have. A round can start with `min_nodes` members."""
    min_nodes: int
    backoff: tuple[float, ...] = field(metadata={"most": 2})
    """The initial and the longest back-off delay in a crash loop, in seconds."""
    now: Optional[datetime] = None
    """The current time on the coordinator's clock. All other times in the report are from the same
    clock.
    """
    news: int = 0
    """A counter that increases with every change to the report other than a change in `progress`.
    """
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
    """The overdue step, if `hang_after` is None. With `hang_after` set, an overdue step becomes an
    incident instead, and this field is None.
    """
    order: str = _at_most(MAX_FIGURES, "")
    """`order_mark` of the pod order that determines the ranks; empty if the ranks follow the
    indices.
    """

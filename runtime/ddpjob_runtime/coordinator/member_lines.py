"""Checks the fields of each line that a member sends, and handles the line by its verb."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddpjob_runtime import protocol
from ddpjob_runtime.coordinator.coordinator import Coordinator
from ddpjob_runtime.coordinator.first_cause import WorkerFailure
from ddpjob_runtime.coordinator.members import Member
from ddpjob_runtime.protocol import FromMember, whole_number

LONGEST_AGE = 600.0
"""Maximum number of seconds between a failure and its report. If the launcher reports a longer
time, a clock was adjusted in between.
"""
LONGEST_CHECK = 4 * 3600
"""Maximum number of seconds that a round can spend on checking its links, no matter what a member
requests.
"""


def _ready(coordinator: Coordinator, member: Member, message: dict[str, Any]) -> None:
    host = message.get("host", "")
    if not isinstance(host, str):
        raise ValueError(f"host: must be a name or an address, not {host!r:.80}")
    check = min(_whole_or_none(message, "check") or 0, LONGEST_CHECK)
    host = protocol.clip(host, protocol.MAX_NAME)
    watch = whole(message, "watch", 2**16 - 1) if "watch" in message else 0
    coordinator.ready(member, whole(message, "after"), host, whole(message, "port", 2**16 - 1), check, watch)


def _joined(coordinator: Coordinator, member: Member, message: dict[str, Any]) -> None:
    coordinator.joined(member, whole(message, "round"))


def _finished(coordinator: Coordinator, member: Member, message: dict[str, Any]) -> None:
    coordinator.finished(member, whole(message, "round"))


def _stacks(coordinator: Coordinator, member: Member, message: dict[str, Any]) -> None:
    text = protocol.clip(message.get("text"), protocol.MAX_TRACEBACK)
    idle = message.get("idle")
    known = idle if isinstance(idle, bool) else None
    coordinator.stacks(member, whole(message, "round"), whole(message, "rank"), text, known)


def _looked(coordinator: Coordinator, member: Member, message: dict[str, Any]) -> None:
    ranks = message.get("ranks")
    if not isinstance(ranks, list) or len(ranks) > protocol.MAX_RANKS:
        raise ValueError(f"ranks: must be a list of at most {protocol.MAX_RANKS} entries, not {ranks!r:.80}")
    looks = [protocol.RankLook.read(rank, f"ranks[{number}]") for number, rank in enumerate(ranks)]
    coordinator.looked(member, whole(message, "round"), looks)


def _neighbour(coordinator: Coordinator, member: Member, message: dict[str, Any]) -> None:
    silent = message.get("silent")
    if not isinstance(silent, bool):
        raise ValueError(f"silent: must be true or false, not {silent!r:.80}")
    coordinator.neighbour(member, whole(message, "round"), whole(message, "rank"), silent)


def _note(coordinator: Coordinator, member: Member, message: dict[str, Any]) -> None:
    kind = protocol.clip(message.get("kind"), protocol.MAX_KIND)
    why = protocol.clip(message.get("why"), protocol.MAX_NOTE)
    coordinator.note(member, kind, why)


def _leaving(coordinator: Coordinator, member: Member, message: dict[str, Any]) -> None:
    coordinator.leaving(member, protocol.clip(message.get("why") or "it was asked to stop"))


def _init_failure(coordinator: Coordinator, member: Member, message: dict[str, Any]) -> None:
    coordinator.init_failure(member, protocol.clip(message.get("message")))


def _failure(coordinator: Coordinator, member: Member, message: dict[str, Any]) -> None:
    coordinator.failure(member, message.get("round"), read_failure(member, message))


def _replaced(coordinator: Coordinator, member: Member, message: dict[str, Any]) -> None:
    coordinator.replaced(whole(message, "generation"), whole(message, "attempt"))


HANDLERS: dict[str, Callable[[Coordinator, Member, dict[str, Any]], None]] = {
    FromMember.READY: _ready,
    FromMember.JOINED: _joined,
    FromMember.FINISHED: _finished,
    FromMember.STACKS: _stacks,
    FromMember.LOOKED: _looked,
    FromMember.NEIGHBOUR: _neighbour,
    FromMember.NOTE: _note,
    FromMember.LEAVING: _leaving,
    FromMember.INIT_FAILURE: _init_failure,
    FromMember.FAILURE: _failure,
    FromMember.REPLACED: _replaced,
}


def read_failure(member: Member, message: dict[str, Any]) -> WorkerFailure:
    """Return the failure that a launcher reports.

    Clocks differ between nodes. The launcher therefore reports how long ago the failure occurred,
    and this function computes its time.
    """
    sent, when = message.get("sent", 0.0), message.get("time", 0.0)
    age: float = sent - when if protocol.is_number(sent) and protocol.is_number(when) else 0.0
    return WorkerFailure(
        source=member.source,
        rank=_whole_or_none(message, "rank"),
        local_rank=_whole_or_none(message, "localRank"),
        exit_code=_whole_or_none(message, "exitCode", negative=True),
        signal=None if message.get("signal") is None else str(message["signal"])[: protocol.MAX_SIGNAL],
        message=protocol.clip(message.get("message")),
        traceback=protocol.clip(message.get("traceback"), protocol.MAX_TRACEBACK),
        time=member.heard - min(max(0.0, age), LONGEST_AGE),
        oom=message.get("oom") is True,
        init=message.get("init") is True,
    )


def whole(message: dict[str, Any], name: str, most: int = protocol.MAX_NUMBER) -> int:
    """Return the value of a field, which must be a whole number from 0 to `most`.

    Raises a ValueError that names the field.
    """
    return whole_number(message.get(name), name, 0, most)


def _whole_or_none(message: dict[str, Any], name: str, negative: bool = False) -> int | None:
    value = message.get(name)
    if value is None:
        return None
    return whole_number(value, name, -protocol.MAX_NUMBER if negative else 0)

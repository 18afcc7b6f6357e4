"""Words and cuts messages: numbers with their nouns, and events as long as the API server accepts."""

from __future__ import annotations

from ddpjob.api.job_status import Slot
from ddpjob.core.failures.classify import Cause

EVENT_BYTES = 1000
"""The events API accepts 1024 bytes."""
_FIRST_LINE_BYTES = 600


def event_text(message: str, facts: str = "") -> str:
    """The first line, facts in brackets, and as much of the traceback's end as an event can hold."""
    first, _, traceback = message.partition("\n")
    head = _cut(first, _FIRST_LINE_BYTES) + (f" ({facts})" if facts else "")
    room = EVENT_BYTES - len(head.encode()) - len("\n...")
    tail = traceback.encode()
    if not tail or room < 80:
        return head
    return f"{head}\n{traceback}" if len(tail) <= room else f"{head}\n...{tail[-room:].decode(errors='ignore')}"


def _cut(text: str, size: int) -> str:
    raw = text.encode()
    return text if len(raw) <= size else raw[: size - 3].decode(errors="ignore") + "..."


def count(number: int, noun: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def why_held(slot: Slot) -> str:
    """Why the slot's next pod is not made yet."""
    if slot.reason == Cause.PREEMPTED:
        return "its room is for the pods that it was preempted for"
    return f"backing off: {slot.reason}, {slot.failures} times in a row"

"""Chooses singular or plural nouns in messages, and shortens messages to fit into events."""

from __future__ import annotations

import re

from ddpjob.api.job_status import Slot
from ddpjob.core.failures.classify import Cause

EVENT_BYTES = 1000
"""Maximum size of an event's message in bytes; the events API accepts 1024."""
_FIRST_LINE_BYTES = 600


def event_text(message: str, facts: str = "") -> str:
    """Return a failure's message, shortened to fit into an event.

    The result has the first line, the facts in parentheses, and as much of the traceback's end as
    fits.
    """
    line, _, traceback = message.partition("\n")
    first, who = _cause_and_place(line)
    facts = "; ".join(filter(None, (who, facts)))
    head = _cut(first, _FIRST_LINE_BYTES) + (f" ({facts})" if facts else "")
    room = EVENT_BYTES - len(head.encode()) - len("\n...")
    tail = traceback.encode()
    if not tail or room < 80:
        return head
    return f"{head}\n{traceback}" if len(tail) <= room else f"{head}\n...{tail[-room:].decode(errors='ignore')}"


def put_cause_first(message: str, facts: str = "") -> str:
    """Return the message with the error itself first, because lists show only the beginning.

    The rank or pod follows in parentheses together with the facts.
    """
    line, newline, rest = message.partition("\n")
    first, who = _cause_and_place(line)
    facts = "; ".join(filter(None, (who, facts)))
    return f"{first} ({facts}){newline}{rest}" if facts else message


def _cause_and_place(line: str) -> tuple[str, str]:
    """Split a failure's first line into the error, and the rank or pod that failed.

    If the line has a different form, return the whole line and an empty rank or pod.
    """
    found = _ENDED_WITH.fullmatch(line)
    return (found[2], found[1] + (found[3] or "")) if found is not None else (line, "")


_ENDED_WITH = re.compile(
    r"((?:rank [0-9]+ in )?pod \S+ ended with (?:exit code -?[0-9]+(?: \(128 \+ \w+\))?|signal \w+)): "
    r"(.+?)(; waits [0-9.e+]+ s)?"
)
"""Matches the first line of a recorded failure (classify.py, new_incidents.py)."""


def _cut(text: str, size: int) -> str:
    raw = text.encode()
    return text if len(raw) <= size else raw[: size - 3].decode(errors="ignore") + "..."


def count(number: int, noun: str) -> str:
    """Return the number with its noun, such as `1 node` or `2 nodes`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def why_held(slot: Slot) -> str:
    """Return why the slot's next pod has not been created yet."""
    if slot.reason == Cause.PREEMPTED:
        return "its room is reserved for the pods that preempted it"
    return f"backing off: {slot.reason}, {slot.failures} times in a row"

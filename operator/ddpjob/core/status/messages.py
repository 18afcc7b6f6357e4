"""Words and shortens messages: numbers with their nouns, and events within the length limit."""

from __future__ import annotations

import re

from ddpjob.api.job_status import Slot
from ddpjob.core.failures.classify import Cause

EVENT_BYTES = 1000
"""Maximum size of an event's message in bytes; the events API accepts 1024."""
_FIRST_LINE_BYTES = 600


def event_text(message: str, facts: str = "") -> str:
    """Return a failure's message shortened to fit into an event.

    It consists of the first line, facts in brackets, and as much of the traceback's end as fits.
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
    """Return the message with an error's own words first.

    The rank or pod with the error and the facts follow in brackets, because a list shows only the
    beginning of the first line.
    """
    line, newline, rest = message.partition("\n")
    first, who = _cause_and_place(line)
    facts = "; ".join(filter(None, (who, facts)))
    return f"{first} ({facts}){newline}{rest}" if facts else message


def _cause_and_place(line: str) -> tuple[str, str]:
    """Return the error and the rank or pod that ended with it, if the line names both."""
    found = _ENDED_WITH.fullmatch(line)
    return (found[2], found[1] + (found[3] or "")) if found is not None else (line, "")


_ENDED_WITH = re.compile(
    r"((?:rank [0-9]+ in )?pod \S+ ended with (?:exit code -?[0-9]+(?: \(128 \+ \w+\))?|signal \w+)): "
    r"(.+?)(; waits [0-9.e+]+ s)?"
)
"""The first line of a recorded failure (classify.py, new_incidents.py)."""


def _cut(text: str, size: int) -> str:
    raw = text.encode()
    return text if len(raw) <= size else raw[: size - 3].decode(errors="ignore") + "..."


def count(number: int, noun: str) -> str:
    """Return `1 node`, `2 nodes`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def why_held(slot: Slot) -> str:
    """Return why the slot's next pod has not been created yet."""
    if slot.reason == Cause.PREEMPTED:
        return "its room is reserved for the pods that preempted it"
    return f"backing off: {slot.reason}, {slot.failures} times in a row"

"""Puts causes into words: what a condition's message and an event hold, and where they are cut."""

from __future__ import annotations

_TRACEBACK_LIMIT = 3000
EVENT_BYTES = 1000
"""What the events' API takes."""


def with_traceback(summary: str, traceback: str) -> str:
    """The summary, and below it the traceback's end."""
    if not traceback.strip():
        return summary
    tail = traceback.strip()[-_TRACEBACK_LIMIT:]
    return f"{summary}\n{tail}"


def event_text(message: str, facts: str = "") -> str:
    """First line, facts in brackets, and as much of the traceback's end as an event takes."""
    first, _, traceback = message.partition("\n")
    head = _cut(first, 600) + (f" ({facts})" if facts else "")
    room = EVENT_BYTES - len(head.encode()) - len("\n...")
    tail = traceback.encode()
    if not tail or room < 80:
        return head
    return f"{head}\n{traceback}" if len(tail) <= room else f"{head}\n...{tail[-room:].decode(errors='ignore')}"


def _cut(text: str, size: int) -> str:
    raw = text.encode()
    return text if len(raw) <= size else raw[: size - 3].decode(errors="ignore") + "..."

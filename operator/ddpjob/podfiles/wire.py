"""What coordinator and launcher say to each other: one JSON object per line; the key "t" names the verb.

Standard library only, any Python from 3.9 on: it runs in users' images.
"""

from __future__ import annotations

import json
import time
from typing import Any

# Exit codes of the launcher; everything else counts as a failure of the node.
EXIT_DONE = 0
EXIT_STEPPED_ASIDE = 75  # of a worker: saved a checkpoint because it was asked to end
EXIT_RENDEZVOUS_LOST = 76
EXIT_STOPPED = 77
EXIT_INIT_FAILURE = 78
EXIT_FENCED = 79  # the round went on without this node

STANDARD, FAST = "Standard", "Fast"

HEARTBEAT_SECONDS = 1.0
SILENCE_SECONDS = 6.0  # a connection that said nothing for so long is dead
RECONNECT_SECONDS = {STANDARD: 3.0, FAST: 120.0}  # how long a member goes on without its coordinator
SETTLE_SECONDS = 0.5  # consequences of a break arrive within this time of its cause

MAX_LINE = 256 * 1024
MAX_TEXT = 4096
MAX_TRACEBACK = 32 * 1024


def encode(verb: str, **fields: Any) -> bytes:
    """One line, ready to send."""
    return (json.dumps(dict(fields, t=verb), separators=(",", ":")) + "\n").encode()


def decode(line: bytes) -> dict[str, Any]:
    """The object of one line.

    Raises:
        ValueError: not a JSON object with a verb; the text says what it is instead.
    """
    try:
        message = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not a line of JSON: {error}: {line[:80]!r}") from None
    if not isinstance(message, dict) or not isinstance(message.get("t"), str):
        raise ValueError(f'a line must be a JSON object with a verb under "t", not {line[:80]!r}')
    return message


def clip(text: object, limit: int = MAX_TEXT) -> str:
    """The text within `limit` characters: a message begins with the error's kind, the last lines of a traceback name the error."""
    full = "" if text is None else str(text)
    if len(full) <= limit:
        return full
    head = min(200, limit // 4)
    return full[:head] + "..." + full[-(limit - head - 3) :]


def iso(seconds: float | None) -> str | None:
    """Unix time -> ISO 8601 in UTC with milliseconds."""
    if seconds is None:
        return None
    whole = int(seconds)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + f".{int((seconds - whole) * 1000):03d}Z"

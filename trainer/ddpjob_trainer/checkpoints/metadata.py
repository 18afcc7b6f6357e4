"""A checkpoint's metadata, which can be read without reading its tensors."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from ddpjob_trainer.errors import CheckpointError

VERSION = 2
"""Version of the content. 1: the optimizer's state by number; 2: by name."""


@dataclass(frozen=True)
class Metadata:
    """Saved after `step` steps by `world` ranks; `epoch`: the number of epochs just completed, None within one.

    `time`: seconds since the Unix epoch.
    """

    step: int
    epoch: int | None = None
    world: int = 1
    time: float = 0.0

    def written(self, **more: Any) -> dict[str, Any]:
        """As it is written to disk, with the content's version and the time."""
        return {"format": VERSION, **asdict(self), "time": round(time.time(), 3), **more}

    @classmethod
    def read(cls, found: Any) -> Metadata:
        """The reverse of `written`. Raises CheckpointError when `found` is something else or of another version."""
        if not isinstance(found, dict) or "format" not in found:
            raise CheckpointError("no checkpoint of this trainer (it carries no checksum)")
        if found["format"] != VERSION:
            raise CheckpointError(
                f"of format {found['format']}, and this trainer reads format {VERSION}; resume it with the trainer that"
                " wrote it"
            )
        try:
            epoch = found["epoch"]
            return cls(
                int(found["step"]), None if epoch is None else int(epoch), int(found["world"]), float(found["time"])
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"damaged (its metadata lacks {error})") from error

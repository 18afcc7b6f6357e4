"""A checkpoint's metadata, which can be read without reading its tensors."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from ddpjob_trainer.errors import CheckpointError

VERSION = 1
"""Version of the metadata's format. Other versions are refused."""
_LATEST = 253402300800
"""The start of the year 10000, as a Unix time in seconds. A later time is a sign of damage."""


@dataclass(frozen=True)
class Metadata:
    """Facts about a checkpoint: `world` ranks saved the checkpoint after `step` steps.

    `epoch` is the number of epochs completed at that point, or None if the checkpoint was saved
    within an epoch. `time` is when the checkpoint was saved, in seconds since the Unix epoch.
    """

    step: int
    epoch: int | None = None
    world: int = 1
    time: float = 0.0

    def written(self, **more: Any) -> dict[str, Any]:
        """Return the metadata in its stored form, with the current time.

        `more` contains other entries to store with the metadata.
        """
        return {"format": VERSION, **asdict(self), "time": round(time.time(), 3), **more}

    @classmethod
    def read(cls, found: Any) -> Metadata:
        """Return the metadata that `written` has put into `found`.

        Raises CheckpointError if `found` is anything else, or has a different version.
        """
        if not isinstance(found, dict) or "format" not in found:
            raise CheckpointError("not a checkpoint of this trainer (it has no checksum)")
        if found["format"] != VERSION:
            raise CheckpointError(
                f"in format {str(found['format'])[:20]}, but this trainer reads format {VERSION}; resume with "
                "the version of the trainer that wrote the checkpoint"
            )
        try:
            step, epoch, world, saved = (found[key] for key in ("step", "epoch", "world", "time"))
        except KeyError as error:
            raise CheckpointError(f"damaged (its metadata lacks {error})") from error
        if not (
            _is_count(step)
            and (epoch is None or _is_count(epoch))
            and _is_count(world)
            and type(saved) in (int, float)
            and 0 <= saved < _LATEST
        ):
            raise CheckpointError("damaged (its metadata contains a value that is not a number or is out of range)")
        return cls(step, epoch, world, float(saved))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63

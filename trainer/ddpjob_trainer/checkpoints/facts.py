"""What a checkpoint says about itself; readable without reading its tensors."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from ddpjob_trainer.errors import CheckpointError

VERSION = 2
"""Of the content. 1: the optimizer's state was numbered; 2: it has names."""


@dataclass(frozen=True)
class Facts:
    """Made after `step` steps by `world` ranks; `epoch`: so many epochs were just complete, None in the middle of one."""

    step: int
    epoch: int | None = None
    world: int = 1
    time: float = 0.0

    def written(self, **more: Any) -> dict[str, Any]:
        """As it is written down, with the content's version and the time."""
        return {"format": VERSION, **asdict(self), "time": round(time.time(), 3), **more}

    @classmethod
    def read(cls, found: Any) -> Facts:
        """From what `written` gave. Raises CheckpointError when it is something else or of another version."""
        if not isinstance(found, dict) or "format" not in found:
            raise CheckpointError("no checkpoint of this trainer (it carries no checksum)")
        if found["format"] != VERSION:
            raise CheckpointError(
                f"of format {found['format']}, and this trainer reads format {VERSION}; resume it with the trainer that wrote it"
            )
        try:
            epoch = found["epoch"]
            return cls(int(found["step"]), None if epoch is None else int(epoch), int(found["world"]), float(found["time"]))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"damaged (what it says of itself lacks {error})") from error

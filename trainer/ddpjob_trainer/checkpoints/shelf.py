"""The checkpoints in one folder, of both formats, and what is known of each."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

from ddpjob_trainer.atomic import remove
from ddpjob_trainer.checkpoints import parts, torch_file
from ddpjob_trainer.checkpoints.retention import Entry
from ddpjob_trainer.errors import CheckpointError

NOTHING, BROKEN = -1, -2
"""Instead of a step: the folder holds no checkpoint; none that is whole."""
_NAME = re.compile(r"step-(\d{9})(\.pt|\.dcp)")


class Shelf:
    """One rank's view of the folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[Path, Entry] = {}

    def place(self, step: int, *, in_parts: bool) -> Path:
        """Where the checkpoint of a step belongs."""
        return self._path / f"step-{step:09d}{parts.SUFFIX if in_parts else torch_file.SUFFIX}"

    def newest_whole(self) -> tuple[int, bytes | Path | None]:
        """(step, content of the file or path of the folder); NOTHING or BROKEN instead of the step. Broken ones are named in warnings."""
        found = self._found()
        for step, path in found:
            try:
                content: bytes | Path = path if path.suffix == parts.SUFFIX else path.read_bytes()
                facts = parts.check(path) if isinstance(content, Path) else torch_file.check(content)
                if facts.step == step:
                    return step, content
                problem = "of another step than its name says"
            except CheckpointError as error:
                problem = str(error)
            except OSError as error:
                problem = f"not readable: {error.strerror}"
            self._known[path] = Entry(step, path, whole=False)
            print(f"warning: checkpoint {path} is {problem}; trying the next older one", file=sys.stderr, flush=True)
        return (BROKEN if found else NOTHING), None

    def entries(self) -> list[Entry]:
        """All, newest first. Only the newest are read as a whole at a start; of older ones their own word is taken. Raises OSError."""
        return [self._known.get(path) or self._look(step, path) for step, path in self._found()]

    def add(self, entry: Entry) -> None:
        """It was put in place, and is whole."""
        self._known[entry.path] = entry

    def remove(self, entry: Entry) -> None:
        """Delete it. What cannot be deleted is told of, and stays known."""
        try:
            remove(entry.path)
            self._known.pop(entry.path, None)
        except OSError as error:
            print(f"warning: checkpoint {entry.path} cannot be removed: {error.strerror}", file=sys.stderr, flush=True)

    def _look(self, step: int, path: Path) -> Entry:
        try:
            facts = parts.read_facts(path) if path.suffix == parts.SUFFIX else torch_file.read_facts(path)
            self._known[path] = Entry(step, path, facts.epoch)
        except CheckpointError:
            self._known[path] = Entry(step, path, whole=False)
        return self._known[path]

    def _found(self) -> list[tuple[int, Path]]:
        matches = ((_NAME.fullmatch(path.name), path) for path in self._path.iterdir())
        return sorted(((int(match[1]), path) for match, path in matches if match), reverse=True)


def prepare_folder(path: Path, keys: str) -> None:
    """Make a folder and prove that it can be written. Raises CheckpointError naming the path, the reason and the remedy."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".probe-") as probe:
            probe.write(b"0")
            probe.flush()
    except OSError as error:
        raise CheckpointError(
            f"folder {path} cannot be written ({error.strerror}): mount it writable for uid {os.getuid()}, or set {keys} to another folder"
        ) from error

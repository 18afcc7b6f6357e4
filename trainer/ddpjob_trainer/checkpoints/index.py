"""Lists the checkpoints of both formats in a folder, and records which of them are known to be
intact.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

from ddpjob_trainer.atomic_files import remove
from ddpjob_trainer.checkpoints import dcp, torch_file
from ddpjob_trainer.checkpoints.retention import Entry
from ddpjob_trainer.errors import CheckpointError

NOTHING, BROKEN = -1, -2
"""Values used in place of a step if the folder has no checkpoint at all, or only broken ones."""
_NAME = re.compile(r"step-(\d{9})(\.pt|\.dcp)")


class CheckpointIndex:
    """What one rank knows about the checkpoints in its folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[Path, Entry] = {}

    def path_of(self, step: int, *, in_parts: bool) -> Path:
        """Return the path where a step's checkpoint is stored."""
        return self._path / f"step-{step:09d}{dcp.SUFFIX if in_parts else torch_file.SUFFIX}"

    def newest_whole(self, *, in_parts: bool = True) -> tuple[int, Path | None]:
        """Return (step, path) of the newest intact checkpoint.

        If there is none, the step is NOTHING or BROKEN, and the path is None. A warning names each
        broken checkpoint. For a checkpoint in parts, only the manifest and the files' names and
        sizes are checked. If `in_parts` is False, checkpoints in parts are ignored.
        """
        found = [(step, path) for step, path in self._found() if in_parts or path.suffix != dcp.SUFFIX]
        for step, path in found:
            if (known := self._known.get(path)) is not None and not known.whole:
                continue
            try:
                metadata = dcp.check_sizes(path) if path.suffix == dcp.SUFFIX else torch_file.check_file(path)
                if metadata.step == step:
                    return step, path
                problem = f"from step {metadata.step}, which contradicts its name"
            except CheckpointError as error:
                problem = str(error)
            except OSError as error:
                problem = f"not readable: {error.strerror or error}"
            self.broken(step, path, problem)
        return (BROKEN if found else NOTHING), None

    def broken(self, step: int, path: Path, problem: str) -> None:
        """Print a warning that a checkpoint is broken, and remember not to resume from it."""
        self._known[path] = Entry(step, path, whole=False)
        text = (
            f"warning: checkpoint {path} is {problem}; trying the next older checkpoint. Repair or "
            "remove the broken one"
        )
        print(text, file=sys.stderr, flush=True)

    def entries(self) -> list[Entry]:
        """Return all checkpoints in the folder, newest first. Raises OSError.

        If nothing is known about a checkpoint yet, only its metadata is read. If its metadata can
        be read, the checkpoint counts as intact.
        """
        return [self._known.get(path) or self._read(step, path) for step, path in self._found()]

    def add(self, entry: Entry) -> None:
        """Record that a complete checkpoint is now in the folder."""
        self._known[entry.path] = entry

    def replaced(self, path: Path) -> None:
        """Forget what is known about a checkpoint that a different checkpoint has replaced."""
        self._known.pop(path, None)

    def remove(self, entry: Entry) -> None:
        """Delete a checkpoint. If that fails, keep its record and print a warning."""
        try:
            remove(entry.path)
            self._known.pop(entry.path, None)
        except OSError as error:
            print(f"warning: checkpoint {entry.path} cannot be removed: {error.strerror}", file=sys.stderr, flush=True)

    def forget_parts_after(self, step: int) -> None:
        """Delete incomplete multi-part checkpoints from steps after `step`.

        If such a checkpoint were kept, it would count as the newest one.
        """
        for later, path in self._found():
            if later <= step or path.suffix != dcp.SUFFIX:
                continue
            try:
                dcp.check_sizes(path)
            except (CheckpointError, OSError):
                self.remove(Entry(later, path))

    def _read(self, step: int, path: Path) -> Entry:
        try:
            metadata = dcp.read_metadata(path) if path.suffix == dcp.SUFFIX else torch_file.read_metadata(path)
            self._known[path] = Entry(step, path, metadata.epoch)
        # FileNotFoundError means that the checkpoint is a dangling link.
        except (CheckpointError, FileNotFoundError):
            self._known[path] = Entry(step, path, whole=False)
        return self._known[path]

    def _found(self) -> list[tuple[int, Path]]:
        matches = ((_NAME.fullmatch(path.name), path) for path in self._path.iterdir())
        return sorted(((int(match[1]), path) for match, path in matches if match), reverse=True)


def prepare_folder(path: Path, keys: str) -> None:
    """Create a folder, and verify that it is writable.

    Raises a CheckpointError that names the path, the reason and the remedy.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".probe-") as probe:
            probe.write(b"0")
            probe.flush()
    except OSError as error:
        raise CheckpointError(
            f"folder {path} cannot be written ({error.strerror}); make it writable for uid "
            f"{os.getuid()}, or set {keys} to a different folder"
        ) from error

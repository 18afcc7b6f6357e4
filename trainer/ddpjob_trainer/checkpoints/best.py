"""Records in DIR/best.json the score of each checkpoint and the name of the best one.

DIR/best.pt (or best.dcp) links to the best checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

from ddpjob_trainer.atomic_files import write_atomically
from ddpjob_trainer.config.sections import Metric

_NAME, _LINK = "best.json", "best"


def read_scores(folder: Path, metric: Metric) -> dict[int, float]:
    """Return the values of `metric` in best.json, keyed by the step of the evaluated checkpoint.

    If the file is damaged or holds the values of a different metric, print a warning and return an
    empty dict. Raises OSError.
    """
    path = folder / _NAME
    try:
        found = json.loads(path.read_text())
        if found["metric"] == metric:
            scores = found["scores"].items()
            return {int(step): math.nan if value is None else float(value) for step, value in scores}
        problem = f"has scores for {found['metric']} instead of checkpoint.best_by={metric}"
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"is damaged ({error})"
    print(
        f"warning: {path} {problem}, so the best checkpoint is chosen only from later evaluations",
        file=sys.stderr,
        flush=True,
    )
    return {}


def mark_best(folder: Path, metric: Metric, scores: dict[int, float], best: Path | None) -> None:
    """Write the scores to best.json, and link to the best checkpoint. Raises OSError.

    An infinite or undefined score is written as null, because JSON cannot represent it.
    """
    content = {
        "best": best and best.name,
        "metric": metric.value,
        "scores": {str(step): value if math.isfinite(value) else None for step, value in sorted(scores.items())},
    }
    write_atomically(folder / _NAME, json.dumps(content, indent=1).encode())
    if best is None:
        _unlink(folder)
        return
    link = folder / f"{_LINK}{best.suffix}"
    temporary = folder / f".{link.name}.{os.getpid()}.tmp"
    temporary.unlink(missing_ok=True)
    try:
        temporary.symlink_to(best.name)
    # Not every file system supports links. Without a link, best.json still names the best
    # checkpoint.
    except OSError:
        return
    # A tool such as rsync --copy-links may have replaced the link with a copy of the checkpoint.
    if link.is_dir() and not link.is_symlink():
        temporary.unlink()
        print(
            f"warning: {link} is a folder instead of a link, so it was not updated and may not be the "
            "best checkpoint; delete this folder",
            file=sys.stderr,
            flush=True,
        )
        return
    temporary.rename(link)
    _unlink(folder, but=link)


def unmark(folder: Path) -> None:
    """Remove best.json and the link to the best checkpoint. Raises OSError."""
    _unlink(folder)
    (folder / _NAME).unlink(missing_ok=True)


def _unlink(folder: Path, but: Path | None = None) -> None:
    for link in folder.glob(f"{_LINK}.*"):
        if link != but and link.is_symlink():
            link.unlink()


def find_marked(folder: Path) -> Path | None:
    """Return the checkpoint that a folder marks as the best one, or None if none is marked."""
    try:
        name = json.loads((folder / _NAME).read_text())["best"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return folder / str(name) if name else None

"""An evaluation's files in RUN/eval: numbers as JSON, the confusion matrix as CSV, and plots."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ddpjob_trainer.atomic_files import write_atomically
from ddpjob_trainer.config.sections import EvalConfig
from ddpjob_trainer.evaluation.accumulate import Evaluation
from ddpjob_trainer.evaluation.curves import Curve

FOLDER = "eval"
_DRAWING_SECONDS, _PAUSE_SECONDS = 120, 60.0


class EvaluationFiles:
    """Writes the evaluations of one run, on rank 0.

    Another process draws the plots while training continues. At most one evaluation per minute is
    drawn, because drawing keeps a core busy for a second or two. The last evaluation is always
    drawn.
    """

    def __init__(self, folder: Path, config: EvalConfig, names: Sequence[str] | None = None) -> None:
        self._folder, self._config, self._names = folder, config, names
        self._painters: list[subprocess.Popen[bytes]] = []
        self._drawn = time.monotonic()
        self._undrawn: Path | None = None

    def write(self, name: str, evaluation: Evaluation, **where: Any) -> Path:
        """Write FOLDER/NAME.json, and the files that belong to it.

        `where` states when the evaluation took place (epoch, step, ...), and is stored in the JSON.
        Raises OSError.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        target = self._folder / f"{name}.json"
        if evaluation.confusion is not None:
            rows = "\n".join(",".join(map(str, row)) for row in evaluation.confusion.tolist())
            write_atomically(self._folder / f"{name}-confusion.csv", f"{rows}\n".encode())
        write_atomically(target, json.dumps(where | document(evaluation, self._names)).encode())
        if self._config.pictures and (evaluation.confusion is not None or evaluation.curves is not None):
            self._undrawn = target
            if time.monotonic() - self._drawn > _PAUSE_SECONDS:
                self._draw(target)
        return target

    def _draw(self, target: Path) -> None:
        self._drawn, self._undrawn = time.monotonic(), None
        command = [sys.executable, "-m", "ddpjob_trainer.evaluation.plots", str(target)]
        self._painters = [painter for painter in self._painters if painter.poll() is None]
        self._painters.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))

    def wait(self) -> None:
        """Wait until the plots of the last evaluation are drawn."""
        if self._undrawn is not None:
            self._draw(self._undrawn)
        for painter in self._painters:
            try:
                painter.wait(_DRAWING_SECONDS)
            except subprocess.TimeoutExpired:
                painter.kill()
                print(
                    f"warning: plots in {self._folder} took more than {_DRAWING_SECONDS} s and were skipped",
                    file=sys.stderr,
                )
        self._painters = []


def document(evaluation: Evaluation, names: Sequence[str] | None) -> dict[str, Any]:
    """Return an evaluation in its JSON form. Numbers that are not finite become null."""
    scalars = evaluation.scalars()
    result: dict[str, Any] = {key: value if math.isfinite(value) else None for key, value in scalars.items()}
    result |= {"samples": evaluation.samples, "nonfinite": evaluation.nonfinite, "unreadable": evaluation.unreadable}
    if evaluation.confusion is None and evaluation.curves is None:
        return result
    of_class = _from_confusion(evaluation.confusion) if evaluation.confusion is not None else []
    if evaluation.curves is not None:
        precisions = evaluation.curves.average_precision
        of_class = [
            {**(of_class[number] if of_class else {}), "averagePrecision": value}
            for number, value in enumerate(precisions)
        ]
        curves = {str(number): _points(each) for number, each in enumerate(evaluation.curves.of_class)}
        if evaluation.curves.pooled is not None:
            curves["micro"] = _points(evaluation.curves.pooled)
        result["prCurves"] = curves
    result["classes"] = [
        {"class": number, **({"name": names[number]} if names else {}), **values}
        for number, values in enumerate(of_class)
    ]
    return result


def _from_confusion(matrix: torch.Tensor) -> list[dict[str, float]]:
    """Return the support, precision, recall and F1 of each class.

    As in scikit-learn, a quotient is 0 if its divisor is 0.
    """
    right, support, taken = matrix.diagonal().double(), matrix.sum(1).double(), matrix.sum(0).double()
    precision, recall = right / taken.clamp(min=1), right / support.clamp(min=1)
    f1 = 2 * right / (support + taken).clamp(min=1)
    columns = zip(support.tolist(), precision.tolist(), recall.tolist(), f1.tolist(), strict=True)
    return [{"support": int(each[0]), "precision": each[1], "recall": each[2], "f1": each[3]} for each in columns]


def _points(curve: Curve) -> dict[str, list[float]]:
    """Return a curve's points as lists, in the form of scikit-learn's arrays.

    Seven digits are kept, more than a plot can show.
    """
    parts = {"precision": curve.precision, "recall": curve.recall, "thresholds": curve.thresholds}
    return {name: [float(f"{value:.7g}") for value in part.tolist()] for name, part in parts.items()}

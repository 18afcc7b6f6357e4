"""python -m benchmarks.recipes [-o FILE.png] [--csv FILE] [--seeds 0 1 2] [--only NAME ...] [--from FILE ...]

Measures the test accuracy of the recipe `shapes`, and of recipes that differ from it in one
ingredient or have a defect. Prints a table (median and range over the seeds), and draws the
accuracy over the epochs.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import free_port

Curves = dict[str, dict[int, dict[int, float]]]
"""The test accuracy by recipe, seed and epoch."""


@dataclass(frozen=True)
class Recipe:
    """The recipe `shapes` with different `keys`, trained on `ranks` ranks.

    If `break_it` is set, it first introduces a defect into their processes.
    """

    name: str
    keys: tuple[str, ...] = ()
    ranks: int = 1
    break_it: Callable[[], None] | None = None


def labels_of_others() -> None:
    """Give each training image the label of a different image."""
    from ddpjob_trainer.data import in_memory

    whole = in_memory.MemoryData.__init__

    def shuffled(self: Any, train: Any, test: Any, **more: Any) -> None:
        images, labels = train
        whole(self, (images, labels.roll(len(labels) // 3)[labels.argsort(stable=True)]), test, **more)

    in_memory.MemoryData.__init__ = shuffled  # type: ignore[method-assign]


def no_normalization_layers() -> None:
    """Remove the model's normalization layers."""
    from ddpjob_trainer.model import models

    whole = models._convolution
    models._convolution = lambda *shape: [layer for layer in whole(*shape) if "Norm" not in type(layer).__name__]


def gradients_of_one_rank() -> None:
    """Disable the gradient exchange, so that each rank trains on its own half of each batch."""
    from ddpjob_trainer.strategies.ddp import Ddp

    Ddp.wrap = lambda self, model: model  # type: ignore[method-assign]


RIGHT = Recipe("shapes")
RECIPES = (
    RIGHT,
    Recipe("no augmentation", ("data.augment=false",)),
    Recipe("no weight decay", ("optim.weight_decay=0",)),
    Recipe("constant rate", ("optim.schedule=constant",)),
    Recipe("constant rate, averaged weights", ("optim.schedule=constant", "optim.ema_decay=0.99")),
    Recipe("rate 10 times as high", ("optim.lr=1",)),
    Recipe("rate 10 times as low", ("optim.lr=0.01",)),
    Recipe("no normalization layers", break_it=no_normalization_layers),
    Recipe("labels shuffled", break_it=labels_of_others),
    Recipe("two ranks, gradients not averaged", ranks=2, break_it=gradients_of_one_rank),
)


def train(recipe: Recipe, seed: int, more: tuple[str, ...] = ()) -> dict[int, float]:
    """Train, and return the test accuracy by epoch.

    Ranks are forks of this process, with one thread each.
    """
    with tempfile.TemporaryDirectory() as folder:
        keys = [*recipe.keys, f"data.seed={seed}", f"checkpoint.dir={folder}", "checkpoint.every_epochs=0", *more]
        ranks = multiprocessing.get_context("fork")
        port = free_port()
        started = [ranks.Process(target=_rank, args=(rank, recipe, keys, port)) for rank in range(recipe.ranks)]
        for process in started:
            process.start()
        for process in started:
            process.join()
        if any(process.exitcode for process in started):
            output = [(Path(folder) / f"rank-{rank}.out").read_text() for rank in range(recipe.ranks)]
            if "nonfinite" in "".join(output) or "not finite" in "".join(output):
                return {}  # The training has diverged, as reported by the trainer.
            raise RuntimeError(f"{recipe.name}: {output}")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        return {row["epoch"]: row["accuracy"] for row in rows if row["event"] == "eval"}


def _rank(rank: int, recipe: Recipe, keys: list[str], port: int) -> None:
    from ddpjob_trainer import config, train

    folder = next(key.partition("=")[2] for key in keys if key.startswith("checkpoint.dir="))
    output = os.open(f"{folder}/rank-{rank}.out", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": recipe.ranks, "LOCAL_WORLD_SIZE": recipe.ranks}
    os.environ.update({key: str(value) for key, value in own.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if recipe.break_it is not None:
        recipe.break_it()
    sys.exit(train.run(config.load("shapes", [*keys, "train.threads=1", "eval.pictures=false"])))


def table(curves: Curves) -> str:
    """Return each recipe's last accuracy: median, lowest and highest over the seeds."""
    lines = ["| recipe | test accuracy, median | lowest to highest | seeds |", "| --- | --- | --- | --- |"]
    for name, by_seed in curves.items():
        last = [curve[max(curve)] for curve in by_seed.values()]
        spread = f"{min(last):.1%} to {max(last):.1%}"
        lines.append(f"| {name} | {statistics.median(last):.1%} | {spread} | {len(last)} |")
    return "\n".join(lines)


def draw(curves: Curves, path: Path) -> None:
    """Draw the medians over the seeds as lines, and bands from the lowest to the highest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5))
    for number, (name, by_seed) in enumerate(curves.items()):
        epochs = sorted(next(iter(by_seed.values())))
        points = [[curve[epoch] * 100 for curve in by_seed.values()] for epoch in epochs]
        style = {"color": "black", "linewidth": 2.5} if name == RIGHT.name else {"color": f"C{number % 10}"}
        dashes = "--" if number > 9 else "-"
        axes.plot(epochs, [statistics.median(values) for values in points], dashes, label=name, **style)
        lowest, highest = [min(values) for values in points], [max(values) for values in points]
        axes.fill_between(epochs, lowest, highest, alpha=0.15, color=style["color"], linewidth=0)
    axes.set(
        xlabel="epoch", ylabel="test accuracy, %", title="Shapes: the recipe, and its variations in one ingredient"
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=9)
    figure.savefig(path, dpi=110, bbox_inches="tight")


def read(paths: list[Path]) -> Curves:
    """Read the curves from files written with `--csv`, in the order of RECIPES."""
    found: Curves = {}
    for path in paths:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                by_seed = found.setdefault(row["recipe"], {})
                by_seed.setdefault(int(row["seed"]), {})[int(row["epoch"])] = float(row["accuracy"])
    return {recipe.name: found[recipe.name] for recipe in RECIPES if recipe.name in found}


def measure(recipes: list[Recipe], seeds: list[int], path: Path) -> None:
    """Train each recipe, seed by seed, and write each curve as soon as it is complete."""
    import ddpjob_trainer.train  # noqa: F401  Once, before the forks.
    import torch

    torch.set_num_threads(1)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["recipe", "seed", "epoch", "accuracy"])
        for seed in seeds:
            for recipe in recipes:
                curve = train(recipe, seed)
                writer.writerows([recipe.name, seed, epoch, accuracy] for epoch, accuracy in curve.items())
                file.flush()
                print(f"seed {seed}, {recipe.name}: {curve[max(curve)]:.1%}", file=sys.stderr, flush=True)


def main() -> None:
    """Measure the curves or read earlier ones, then print the table and draw the chart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.png", help="draw the curves to this file")
    parser.add_argument(
        "--csv", type=Path, default=Path("recipes.csv"), metavar="FILE", help="write the accuracies to this file"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=[recipe.name for recipe in RECIPES], metavar="NAME")
    parser.add_argument(
        "--from", dest="sources", type=Path, nargs="+", metavar="FILE.csv", help="read these files instead of measuring"
    )
    args = parser.parse_args()
    if not args.sources:
        by_name = {recipe.name: recipe for recipe in RECIPES}
        if unknown := set(args.only) - by_name.keys():
            parser.error(f"--only: unknown: {', '.join(sorted(unknown))}; choose from {', '.join(by_name)}")
        measure([by_name[name] for name in args.only], args.seeds, args.csv)
    curves = read(args.sources or [args.csv])
    print(table(curves))
    if args.output:
        draw(curves, args.output)


if __name__ == "__main__":
    main()

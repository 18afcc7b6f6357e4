"""Measures the trainer on one GPU within a time budget, next to plain loops and published figures.

    python -m benchmarks.trainer --gpu [--minutes 5] [--device cpu] [--cases cifar-eager,...]

Each row of the table is a process. It is printed, and the JSON file is replaced, as soon as the
process ends, so a budget that ends early loses no figures. The most important rows come first. A
row that fails, or for which too little time is left, says `not run` and why.

`--device cpu` tests the command with tiny sizes; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import CHECKOUT
from benchmarks.marks import write_between
from benchmarks.processes import kill_all
from benchmarks.trainer.pipelines import Case, environment, make_data, plain_command, trainer_command

CASES = (
    Case("cifar", "cifar", "resnet18_cifar", 128, 100, 400, None, "CIFAR-10, ResNet-18", recorded=100),
    Case("resnet50", "bare", "torchvision:resnet50", 256, 20, 80, None, "ResNet-50 at 224", recorded=20),
    Case("jpeg", "jpeg", "tiny", 256, 10, 50, None, "JPEGs, hardly any network at 224", recorded=10),
)
SMALL: dict[str, Any] = {"model": "tiny", "batch": 8, "warm": 2, "steps": 8, "recorded": 2}
"""The sizes for `--device cpu`."""
MODES = {"eager": "false", "compiled": "default", "graph": "reduce-overhead"}
"""The modes of torch.compile. `graph` replays CUDA graphs."""
PLAN = (
    ("cifar", "eager", 15), ("resnet50", "eager", 20), ("cifar", "graph", 45), ("jpeg", "eager", 20),
    ("airbench", "", 90), ("cifar", "compiled", 45), ("resnet50", "graph", 60), ("resnet50", "compiled", 60),
)  # fmt: skip
"""The cases in order, with the seconds that each of their processes is expected to take."""
PUBLISHED = "DeepLearningExamples on one A100 80GB, as published", {"images_per_second": 2470}
"""github.com/NVIDIA/DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5/README.md,
"Training performance: NVIDIA DGX A100 (8x A100 80GB)", one GPU, mixed precision, container 21.03.
"""
RECIPE = "cifar10-94"
"""The trainer's recipe that runs next to airbench."""
RUNS = 3
"""Number of airbench's runs after its warm-up. The published script has 200."""
MOST_BUSY = 1.02
"""A larger busy share shows a defect. Recorded steps may take slightly longer than counted ones."""

Figures = dict[str, Any]


def read_steps(output: str) -> Figures:
    """Return the last line that StepTimer printed."""
    printed = [line for line in output.splitlines() if line.startswith('{"images_per_second"')]
    figures: Figures = json.loads(printed[-1]) if printed else {"step_ms": 0}
    if not figures["step_ms"] > 0 or not (figures["busy"] is None or 0 < figures["busy"] <= MOST_BUSY):
        raise ValueError(f"implausible figures {figures}" if printed else "no figures were printed")
    return figures


def read_airbench(output: str) -> Figures:
    """Return the means of the runs after the warm-up, which are the rows `eval` of its table."""
    rows = [[cell.strip() for cell in line.split("|")] for line in output.splitlines() if line.count("|") > 6]
    ends = [(float(row[5]), float(row[6])) for row in rows if row[2] == "eval"][1:]
    accuracy, seconds = map(statistics.mean, zip(*ends, strict=True))
    return {"accuracy": accuracy, "seconds": seconds}


def read_recipe(folder: Path, _output: str) -> Figures:
    """Return the result of a run of the trainer, from its metrics.jsonl."""
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    last = {line["event"]: line for line in lines}
    return {"accuracy": last["eval"]["accuracy"], "seconds": last["end"]["time"] - last["start"]["time"]}


@dataclass(frozen=True)
class Row:
    """A row of the table, and the process that measures it unless its `figures` are published."""

    name: str
    meaning: str
    by: str
    seconds: float
    command: tuple[str, ...] = ()
    read: Callable[[str], Figures] = read_steps
    prepare: Callable[[], None] = lambda: None
    why_not: str = ""
    figures: Figures | None = None


def plan(given: argparse.Namespace, scratch: Path, why_not: str) -> Iterator[Row]:
    """Yield the rows. `why_not` is the reason why no process can be measured, if there is one."""
    found = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.dali")
    small = given.device == "cpu"
    cases = {case.name: replace(case, meaning=f"{case.name}, tiny", **SMALL) if small else case for case in CASES}
    for name, mode, seconds in PLAN:
        if name == "airbench":
            yield from plan_airbench(given, scratch, seconds, "needs a GPU" if small else why_not)
            continue
        case, data, full = cases[name], scratch / name, f"{name}-{mode}"
        start = ("env", "CUDA_VISIBLE_DEVICES=") if small else ()
        plain = (*start, *plain_command(case, data, given.workers))
        trained, dali = (
            (*start, *trainer_command(case, data, given.workers, scratch / f"{full}-{by}"))
            for by in ("trainer", "dali")
        )
        meaning, prepare = f"{case.meaning}, {case.batch} per step, {mode}", functools.partial(make_data, case, data)
        row = Row(full, meaning, "plain loop", seconds, prepare=prepare, why_not=why_not)
        yield replace(row, command=(*plain, f"--compile={MODES[mode]}"))
        yield replace(row, by="trainer", command=(*trained, f"model.compile={MODES[mode]}"))
        if name == "jpeg":
            missing = why_not or ("" if found else "nvidia-dali is not installed")
            yield replace(row, by="trainer with DALI", command=(*dali, "data.decoder=dali"), why_not=missing)
        elif full == "resnet50-eager":
            yield replace(row, by=PUBLISHED[0], figures=PUBLISHED[1])


def plan_airbench(given: argparse.Namespace, scratch: Path, seconds: float, why_not: str) -> Iterator[Row]:
    """Yield the rows of whole runs on CIFAR-10: the trainer's recipe, and the published script."""
    folder, out = scratch / "airbench", scratch / "recipe"
    script, data = (path and path.resolve() for path in (given.airbench, given.cifar))

    def prepare() -> None:
        (folder / "cifar10").mkdir(parents=True)
        (folder / "cifar10" / "cifar-10-batches-py").symlink_to(data / "cifar-10-batches-py")
        (folder / "script.py").write_text(script.read_text().replace("range(200)", f"range({RUNS})"))

    why_not = why_not or ("" if data else "no --cifar")
    recipe = (sys.executable, "-m", "ddpjob_trainer", "--config", RECIPE, f"data.dir={data}", f"checkpoint.dir={out}")
    row = Row("airbench", "CIFAR-10, a whole run", f"trainer, {RECIPE}", seconds / 3, why_not=why_not)
    yield replace(row, command=recipe, read=functools.partial(read_recipe, out))
    command, by = ("env", "-C", str(folder), sys.executable, "-u", "script.py"), f"airbench94_muon, {RUNS} runs"
    why_not = why_not if script else "no --airbench"
    yield Row(row.name, row.meaning, by, seconds, command, read_airbench, prepare, why_not)
    yield replace(row, by="airbench94_muon on an A100, as published", figures={"accuracy": 0.9401, "seconds": 2.59})


def run(row: Row, limit: float, logs: Path) -> Figures:
    """Return the figures of a row's process, or the reason why there are none as `not_run`.

    Figures count even if the process fails later, for example while it records; `ended` says why.
    """
    with (logs / "out").open("wb") as out, (logs / "err").open("wb") as err:
        try:
            row.prepare()
        except (OSError, ImportError) as error:
            return {"not_run": f"cannot prepare: {error}"}
        process = subprocess.Popen(row.command, cwd=CHECKOUT, env=environment(), stdout=out, stderr=err)
        try:
            code = process.wait(limit)
            ended = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            ended = f"stopped after {limit:.0f} s"
        finally:
            if process.poll() is None:
                kill_all(process)
    if ended:
        said = [line for line in (logs / "err").read_text(errors="replace").splitlines() if line.strip()]
        ended = re.sub(r"[|\s]+", " ", ": ".join([ended, *said[-1:]]))[:200]
    try:
        figures = row.read((logs / "out").read_text(errors="replace"))
    except (ValueError, LookupError, OSError) as error:
        return {"not_run": ended or f"{type(error).__name__}: {error}"}
    return {**figures, "ended": ended} if ended else figures


def measure(rows: Iterable[Row], budget: float) -> Iterator[tuple[Row, Figures]]:
    """Yield each row with its figures, within `budget` seconds.

    A process is not started if it is expected to take longer than the time that is left, and it is
    stopped after three times its expected time.
    """
    end = time.monotonic() + budget
    with tempfile.TemporaryDirectory(prefix="gpu-benchmark-") as logs:
        for row in rows:
            left = max(0.0, end - time.monotonic())
            late = f"takes about {row.seconds:.0f} s, but only {left:.0f} s are left" if left < row.seconds else ""
            skipped = {"not_run": row.why_not or late} if row.why_not or late else None
            yield row, row.figures or skipped or run(row, min(left, 3 * row.seconds), Path(logs))


HEAD = "| case | by | images/s | of plain | ms per step | device busy |\n| --- | --- | ---: | ---: | ---: | ---: |"


def line(row: Row, figures: Figures, plain: float | None) -> str:
    """Return a line of the table. `plain` is the plain loop's speed in the same case."""
    cells = [f"not run ({figures.get('not_run')})", "", "", ""]
    if "accuracy" in figures:
        cells[0] = f"{figures['accuracy']:.2%} in {figures['seconds']:.1f} s"
    elif speed := figures.get("images_per_second"):
        step, busy = figures.get("step_ms"), figures.get("busy")
        last = ", ".join(filter(None, [busy and f"{busy:.0%}", figures.get("ended")]))
        cells = [f"{speed:,.0f}", plain and f"{speed / plain:.2f}", step and f"{step:.2f}", last]
    return f"| {' | '.join([row.meaning, row.by, *(cell or '' for cell in cells)])} |"


def look_at_machine(device: str) -> Figures:
    """Return facts about the machine. A separate process asks torch, so that this one takes no GPU
    memory.
    """
    name = "torch.cuda.is_available() and torch.cuda.get_device_name()"
    code = f"import json, torch; print(json.dumps([torch.__version__, {name}]))"
    version, name = json.loads(subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()[-1])
    facts = {"date": time.strftime("%Y-%m-%d %H:%M"), "device": "cpu" if device == "cpu" else name or None}
    return {**facts, "torch": version, "cores": os.cpu_count(), "load average": round(os.getloadavg()[0], 1)}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `--gpu`."""
    parser.add_argument("--gpu", action="store_true", help="measure on one GPU instead, within --minutes")
    parser.add_argument("--minutes", type=float, default=5, help="time budget of --gpu (default 5)")
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu", help="cpu: test --gpu with tiny sizes")
    parser.add_argument("--json", type=Path, default=Path("trainer-gpu.json"), help="figures of --gpu (%(default)s)")
    parser.add_argument("--airbench", type=Path, metavar="FILE", help="airbench94_muon.py, to run it on --cifar")
    parser.add_argument("--cifar", type=Path, metavar="FOLDER", help="contains cifar-10-batches-py")


def main(given: argparse.Namespace) -> int:
    """Print the table. Return 0 if each requested row was measured."""
    facts = look_at_machine(given.device)
    why_not = "" if facts["device"] else "torch does not find a GPU on this machine"
    found, lines, plain = list[Figures](), [HEAD], dict[str, float]()
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory(prefix="gpu-benchmark-") as scratch:
        planned = plan(given, Path(scratch), why_not)
        rows = [row for row in planned if not given.cases or row.name in given.cases.split(",")]
        for row, figures in measure(rows, 60 * given.minutes):
            if row.by == "plain loop" and "images_per_second" in figures:
                plain[row.name] = figures["images_per_second"]
            lines.append(line(row, figures, plain.get(row.name) if row.figures is None else None))
            print(lines[-1], flush=True)
            found.append({"name": row.name, "case": row.meaning, "by": row.by, **figures})
            written = given.json.with_suffix(".new")
            written.write_text(json.dumps({**facts, "minutes": given.minutes, "rows": found}, indent=1) + "\n")
            written.replace(given.json)
    lines.append(f"\n{'; '.join(f'{name} {value}' for name, value in facts.items() if value is not None)}.")
    print(lines[-1])
    if given.table:
        write_between(given.table, "gpu", "\n".join(lines))
    return int(not rows or any({"not_run", "ended"} & figures.keys() for figures in found))

"""Draws pictures of the chart's Grafana dashboards, from a run with faults on the test cluster
(make cluster-up).

    python -m benchmarks.panels record FOLDER                          # a quarter of an hour
    python -m benchmarks.panels draw FOLDER [-o docs/images] [--table docs/monitoring.md]   # as often as you like

`record` runs two replicas of the operator, jobs, faults, and a real Prometheus that scrapes both
replicas and has the chart's alerts. `draw` starts Prometheus again on the recorded data, runs the
panels' own queries, and draws each panel at its place in the dashboard's grid. It reads the JSON
that Grafana imports; Grafana itself is not used.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import yaml

from benchmarks.marks import add_table_option, write_between
from benchmarks.panels.board import Range
from benchmarks.panels.drawing import draw
from benchmarks.panels.scene import MONITORING, SCRAPE_SECONDS, firing, play, scene
from benchmarks.processes import exit_on_sigterm
from benchmarks.testbed import Cluster, PrometheusServer, processes

_KEPT = "run.json"


def record(options: argparse.Namespace) -> int:
    """Record a run. Return 0, or 2 without a cluster."""
    cluster = Cluster()
    if cluster.state() is None:
        print("the test cluster is not running; start it with make cluster-up", file=sys.stderr)
        return 2
    folder: Path = options.folder
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    with scene(cluster, folder) as stage:
        made = play(stage)
        made["load"] = os.getloadavg()[2]
    (folder / _KEPT).write_text(json.dumps(made, indent=1))
    return 0


def drawn(options: argparse.Namespace) -> int:
    """Draw the dashboards. Return 0, or 1 if a panel has no data."""
    made = json.loads((options.folder / _KEPT).read_text())
    shown = Range(made["start"], made["end"], SCRAPE_SECONDS)
    kept = {"global": {"scrape_interval": "1h"}}
    server = PrometheusServer(options.folder, kept)
    try:
        processes.wait_for("Prometheus", lambda: _answers(server), timeout=60)
        empty = []
        for path in sorted((MONITORING / "dashboards").glob("*.json")):
            variables = {name: made[name] for name in ("namespace", "job_name")}
            picture = options.output / f"grafana-{path.stem}.png"
            empty += [f"{path.stem}: {title}" for title in
                      draw(json.loads(path.read_text()), server.ask, variables, shown, picture)]  # fmt: skip
            print(f"{picture}: {picture.stat().st_size / 1000:.0f} kB")
        text = table(made, server)
    finally:
        server.stop()
    if options.table:
        write_between(options.table, "panels", text)
    print("\n".join([text, *(f"no data: {name}" for name in empty)]))
    return int(bool(empty))


def _answers(server: PrometheusServer) -> bool:
    try:
        return bool(server.ask("labels"))
    except OSError:
        return False


def table(made: dict[str, Any], server: PrometheusServer) -> str:
    """Return each alert with the fault that caused it, and the seconds between them."""
    groups = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    acts = {act["alert"]: act for act in made["acts"] if act["alert"]}
    lines = ["| alert | fault | seconds from the fault until the expression was true |", "| --- | --- | --- |"]
    for name in [rule["alert"] for group in groups for rule in group["rules"]]:
        act = acts[name]
        asked = firing(name, act["job"])
        times = {"start": str(act["at"]), "end": str(made["end"] + 600), "step": "1"}
        moments = [
            float(v[0]) for each in server.ask("query_range", query=asked, **times)["result"] for v in each["values"]
        ]
        after = f"{min(moments) - act['at']:.0f}" if moments else "it did not fire"
        lines.append(f"| {name} | {act['what']} | {after} |")
    return "\n".join(
        [*lines, "", f"2 nodes on {os.cpu_count()} cores; the 15-minute load average was {made['load']:.0f}."]
    )


def main() -> int:
    """Run the command, and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="record a run, and keep Prometheus' data in FOLDER")
    recording.add_argument("folder", type=Path, metavar="FOLDER", help="a new folder")
    recording.set_defaults(function=record)
    drawing = commands.add_parser("draw", help="draw the dashboards from FOLDER")
    drawing.add_argument("folder", type=Path, metavar="FOLDER")
    drawing.add_argument("-o", "--output", type=Path, default=Path("docs/images"), help="default docs/images")
    add_table_option(drawing, "panels")
    drawing.set_defaults(function=drawn)
    options = parser.parse_args()
    code: int = options.function(options)
    return code


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())

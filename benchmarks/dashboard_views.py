"""Measures the dashboard's views with many jobs: `python -m benchmarks.dashboard_views [JOBS]`.

Jobs are records of the process backend, as `ddpjob run` writes them. This process holds the locks
of the running jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
from ddpjob.api.job_status import format_time
from ddpjob.client.backends.process_backend import ProcessBackend
from ddpjob.core.status.messages import count, put_cause_first
from ddpjob.dashboard.fleet import Fleet
from ddpjob.dashboard.gate import FleetView, OneSession
from ddpjob.dashboard.web_server import serve
from ddpjob.local.paths import RUNS_VARIABLE, JobFolder
from ddpjob.local.record import write_record

TRACEBACK = """\
rank 3 in pod {pod} ended with exit code 1: ValueError: loss is NaN at step 4121
Traceback (most recent call last):
  File "/app/train.py", line 88, in main
    trainer.fit(model)
  File "/app/trainer.py", line 214, in fit
    raise ValueError(f"loss is NaN at step {{step}}")
ValueError: loss is NaN at step 4121"""
_KINDS = ("Running",) * 5 + ("Complete",) * 8 + ("Failed", "Pending", "Restarting", "Suspended")
_NAMES = (
    "resnet50-imagenet",
    "llama-sft",
    "whisper-small",
    "bert-pretrain",
    "vit-b16-imagenet21k-learning-rate-3",
    "detr-coco",
    "digits",
    "moe-8x7b",
)
_CAUSES = (
    ("NodeLost", "the Kubernetes node gpu-{n} does not respond"),
    ("OOMKilled", "the pod exceeded its 64Gi"),
    ("Preempted", "a pod with a higher priority needs the room"),
    ("WorkerFailed", TRACEBACK),
)


def record(number: int, now: datetime) -> dict[str, Any]:
    """Return a job's record, whose kind and figures depend on `number`."""
    state, name = _KINDS[number * 7 % len(_KINDS)], f"{_NAMES[number % len(_NAMES)]}-{number:04d}"
    nodes, age = 1 << number % 4, 900 + number * 611 % 90_000
    created, started = now - timedelta(seconds=age), now - timedelta(seconds=age - 40)

    def moment(ago: float) -> str:
        return format_time(now - timedelta(seconds=ago)) or ""

    def condition(kind: str, holds: bool, reason: str, message: str, ago: float = 300) -> dict[str, Any]:
        return {
            "type": kind,
            "status": str(holds),
            "reason": reason,
            "message": message,
            "lastTransitionTime": moment(ago),
        }

    recent = []
    for restart in range(min(number % 5, 4) if state != "Pending" else 0):
        cause, message = _CAUSES[(number + restart) % 4]
        pod = f"{name}-{restart % nodes}-{restart}"
        recent.append(
            {
                "time": moment(age * (0.8 - 0.17 * restart)),
                "pod": pod,
                "index": restart % nodes,
                "reason": cause,
                "message": message.format(n=number % 64, pod=pod),
                "counted": cause in ("OOMKilled", "WorkerFailed"),
                "seconds": 4.0 + restart * 9,
                "round": restart + 1,
                "node": f"gpu-{number % 64}",
                "rank": 3,
            }
        )
    if state == "Failed":
        last = TRACEBACK.format(pod=f"{name}-0-4")
        recent.append(
            {
                "time": moment(min(300, age / 3)),
                "pod": f"{name}-0-4",
                "index": 0,
                "reason": "WorkerFailed",
                "message": last,
                "counted": True,
                "rank": 3,
            }
        )
    counted = sum(restart["counted"] for restart in recent)
    limit = max(0, counted - 1) if state == "Failed" else 10
    percent = 100 if state == "Complete" else number * 37 % 97
    running = state == "Running"
    conditions = [
        condition(
            "Scheduled",
            state != "Pending",
            *(
                ("AllPlaced", f"{nodes} of {nodes} pods are scheduled")
                if state != "Pending"
                else ("Unschedulable", f"{name}-0-0: 0/64 nodes are available: 64 Insufficient nvidia.com/gpu.")
            ),
        )
    ]
    conditions.append(
        condition("Running", running, "GroupRuns" if running else "NodesMissing", f"{nodes} nodes", age - 70)
    )
    if state == "Restarting":
        recent = recent or [
            {
                "time": moment(20),
                "pod": f"{name}-0-0",
                "reason": "NodeLost",
                "counted": False,
                "message": "the Kubernetes node gpu-7 does not respond",
                "round": 1,
            }
        ]
        recent[-1] |= {"time": moment(20)}
        recent[-1].pop("seconds", None)
        conditions.append(condition("Restarting", True, recent[-1]["reason"], recent[-1]["message"], 20))
    if state == "Failed":
        spent = f"{count(counted, 'failure')}, but recovery.maxRestarts is {limit}"
        message = f"WorkerFailed: {put_cause_first(last, spent)}"
        conditions.append(condition("Failed", True, "RestartBudgetSpent", message))
    if state == "Complete":
        conditions.append(condition("Complete", True, "Finished", f"all {nodes} nodes have finished"))
    if state == "Suspended":
        conditions.append(condition("Suspended", True, "Suspended", "spec.runPolicy.suspend is true"))
    held = nodes if state in ("Running", "Restarting") else 0
    progress = {
        "epoch": 1 + percent // 4,
        "epochs": 25,
        "step": percent * 420,
        "steps": 42_000,
        "percent": percent,
        "display": f"epoch {1 + percent // 4}/25 {percent} %",
        "loss": 2.4 / (1 + percent),
        "updatedAt": moment(2),
        "lossDisplay": f"{2.4 / (1 + percent):.4g}",
        "samplesPerSecond": 812.0 * nodes,
        "speedDisplay": f"{812 * nodes:,}/s",
        "eta": f"{1 + number % 9}h{number % 60:02d}m",
        "metrics": {"accuracy": 0.5 + percent / 220},
    }
    status: dict[str, Any] = {
        "phase": state,
        "schema": 1,
        "conditions": conditions,
        "round": len(recent),
        "highestAttempt": len(recent),
        "nodes": {
            "wanted": nodes,
            "active": held,
            "ready": nodes if running else 0,
            "spare": 0,
            "display": f"{nodes if running or state == 'Complete' else 0}/{nodes}",
        },
        "rendezvous": {"nodes": nodes},
        "slots": [
            {"attempt": len(recent), "state": "Running" if held else "Planned", "node": f"gpu-{n}"}
            for n in range(nodes)
        ],
        "restarts": {
            "counted": counted,
            "uncounted": len(recent) - counted,
            "total": len(recent),
            "recent": recent,
            "max": limit,
            "display": f"{counted}/{limit}" + (f" +{len(recent) - counted}" if len(recent) > counted else ""),
        },
    }
    if state != "Pending":
        status |= {"startTime": format_time(started), "progress": progress, "gpuSeconds": 8 * nodes * (age - 60)}
    if state in ("Complete", "Failed"):
        status["completionTime"] = moment(min(300, age / 3))
    pods = [{"name": f"{name}-{n}-{len(recent)}", "role": "node", "state": "Running", "logs": []} for n in range(held)]
    return {
        "apiVersion": "ddpjob.io/v1alpha1",
        "kind": "DDPJob",
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": str(number),
            "creationTimestamp": format_time(created),
        },
        "spec": {
            "image": "ghcr.io/team/train:1",
            "script": "train.py",
            "nodes": nodes,
            "gpusPerNode": 8,
            "recovery": {"mode": "Standard", "maxRestarts": limit},
        },
        "status": status,
        "local": {"run": "1", "folder": "", "pods": pods, "stallSeconds": []},
    }


@contextlib.contextmanager
def runs(root: Path, jobs: int) -> Iterator[list[str]]:
    """Write records of `jobs` jobs into a folder, and yield their names.

    The locks of unfinished jobs are held until the context ends.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 8192), hard), hard))
    with contextlib.ExitStack() as held:
        names = []
        now = datetime.now(UTC)
        for number in range(jobs):
            body = record(number, now)
            folder = JobFolder(root / body["metadata"]["name"])
            run = folder.run("1")
            run.pods.mkdir(parents=True)
            body["local"]["folder"] = str(run.path)
            write_record(folder, body)
            run.events.write_text(
                "".join(
                    json.dumps(
                        {
                            "time": restart["time"],
                            "warning": True,
                            "reason": restart["reason"],
                            "message": restart["message"],
                        }
                    )
                    + "\n"
                    for restart in body["status"]["restarts"]["recent"]
                )
            )
            for pod in body["local"]["pods"]:
                run.log(pod["name"], "trainer").write_text(
                    "".join(f"step {n}: loss {2 / n:.4f}\n" for n in range(1, 60))
                )
            if body["status"]["phase"] not in ("Complete", "Failed"):
                lock = held.enter_context(folder.lock.open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
                lock.write(str(os.getpid()))
                lock.flush()
            names.append(folder.name)
        yield names


@contextlib.asynccontextmanager
async def served(fleet: Fleet, token: str) -> Any:
    """Serve a fleet's dashboard on a free port, and yield its base URL."""
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(
        serve(
            OneSession(FleetView(fleet, lambda namespace: fleet.backends[0], fleet.backends[0].where), token),
            host="127.0.0.1",
            port=0,
            started=port.set_result,
        )
    )
    try:
        await asyncio.wait({task, port}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        yield f"http://127.0.0.1:{port.result()}"
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _measure(names: list[str]) -> None:
    began = time.perf_counter()
    with Fleet(ProcessBackend()) as fleet:
        print(f"all jobs read once: {time.perf_counter() - began:.2f} s")
        async with (
            served(fleet, "t") as address,
            aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as web,
        ):
            async with web.get(f"{address}/?token=t") as first:
                assert first.status == 200
            views = {
                "all jobs": ["/", "/?sort=name&page=7", "/?sort=age&dir=desc"],
                "filtered": ["/?q=llama", "/?q=oomkilled&state=Restarting", "/?state=Failed&sort=runtime"],
                "a job": [f"/jobs/default/{name}" for name in names[:60]],
                "its manifest": [f"/jobs/default/{name}/manifest" for name in names[:60]],
            }
            for title, paths in views.items():
                times, used = list[float](), time.process_time()
                for number in range(max(60, len(paths))):
                    begin = time.perf_counter()
                    async with web.get(address + paths[number % len(paths)]) as answer:
                        size = len(await answer.read())
                        assert answer.status == 200, answer.status
                    times.append((time.perf_counter() - begin) * 1000)
                ordered = sorted(times)
                middle, late = statistics.median(ordered), ordered[int(len(ordered) * 0.95)]
                processor = (time.process_time() - used) * 1000 / len(times)
                print(
                    f"{title:<14} median {middle:6.1f} ms   95 % below {late:6.1f} ms   "
                    f"processor {processor:5.1f} ms   {size / 1024:5.0f} KiB"
                )


def main() -> int:
    jobs = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    with tempfile.TemporaryDirectory() as folder:
        os.environ[RUNS_VARIABLE] = folder
        with runs(Path(folder), jobs) as names:
            print(f"{jobs} jobs")
            asyncio.run(_measure(names))
    return 0


if __name__ == "__main__":
    sys.exit(main())

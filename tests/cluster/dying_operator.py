"""An operator that dies once before and once after every kind of call: `python dying_operator.py
SEEN_FILE`.

The first call of a kind ends the process before the call is made, as SIGKILL would. The second call
is made, and the process ends right after it. Later calls work normally. A file records the calls,
so that one job experiences all of these deaths over many restarts of the operator. To end the
operator, kill its process group.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ddpjob.controller import main as operator_main
from ddpjob.controller.kubernetes_cluster import KubernetesCluster
from ddpjob.controller.operator_settings import Settings

DEAD = 137


def _signature(verb: str, arguments: tuple[Any, ...]) -> str:
    """Return the kind of a call: its verb and its object. A status is identified by its phase, and
    an event by its reason.
    """
    match verb, arguments:
        case "write_status", (status, *_):
            slots = ",".join(f"{s['attempt']}{s['state']}" for s in status.get("slots", ()))
            return f"write_status {status.get('phase')} {slots}"
        case "create", (manifest, *_):
            return f"create {manifest['kind']} {manifest['metadata']['name']}"
        case "delete_pod", (name, *_):
            return f"delete_pod {name}"
        case "delete", (kind, name, *_):
            return f"delete {kind} {name}"
        case "change_workload", (name, _, change):
            return (
                f"change_workload {name} {change.keywords['condition'] if isinstance(change, partial) else 'released'}"
            )
        case "label_pod", (name, _, role, *_):
            return f"label_pod {name} {role}"
        case "notify", (_, sent, *_):
            return f"notify {sent}"
        case "record", (event, *_):
            return f"record {event.reason}"
    return verb


def _meet(line: str) -> int:
    """Record a call, and return how often it was recorded before."""
    seen = Path(sys.argv[1])
    times = seen.read_text().splitlines().count(line) if seen.exists() else 0
    with seen.open("a") as file:
        file.write(line + "\n")
    return times


def _dying(verb: str) -> Callable[..., Any]:
    method = getattr(KubernetesCluster, verb)

    async def call(self: KubernetesCluster, job: Any, *arguments: Any) -> Any:
        line = f"{job.name}: {_signature(verb, arguments)}"
        times = _meet(line)
        if times >= 2:
            return await method(self, job, *arguments)
        if times == 0:
            os._exit(DEAD)
        await method(self, job, *arguments)
        os._exit(DEAD)

    return call


def _live() -> int:
    """Run the operator in a fork of this process, which has already imported the modules, and
    return the exit code.
    """
    life = os.fork()
    if not life:
        asyncio.run(operator_main.run_until_signal(Settings.from_environment()))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(life, 0)[1])


if __name__ == "__main__":
    pods, others = ("delete_pod", "label_pod"), ("delete", "change_workload")
    for name in ("write_status", "create", *pods, *others, "notify", "record"):
        setattr(KubernetesCluster, name, _dying(name))
    while (code := _live()) == DEAD:
        pass
    sys.exit(f"the operator ended with {code}, of something other than the test")

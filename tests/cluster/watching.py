"""Records when the status of a job changed, by this machine's clock. It watches the jobs of a
namespace as `kubectl get --watch` does.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

from machine import slowness
from testcluster.cluster import Cluster

Json = dict[str, Any]


def at_once() -> float:
    """Return the maximum delay from an event to the status that reports it: 2 s, longer on a busy
    machine.
    """
    return 2.0 * slowness()


class Watch:
    """Records every state of every job in a namespace that the API server sends, and its time of
    arrival.
    """

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._seen: list[tuple[float, Json]] = []
        path = f"/apis/ddpjob.io/v1alpha1/namespaces/{namespace}/ddpjobs?watch=1"
        self._kubectl = subprocess.Popen(
            [cluster.programs / "kubectl", "--kubeconfig", cluster.kubeconfig, "get", "--raw", path],
            stdout=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._kubectl.stdout is not None
        for line in self._kubectl.stdout:
            self._seen.append((time.time(), json.loads(line)["object"]))

    def close(self) -> None:
        self._kubectl.terminate()
        self._kubectl.wait()

    def first(self, name: str, holds: Callable[[Json], bool], timeout: float = 60) -> tuple[float, Json]:
        """Wait until the job's status fulfills `holds`. Return the time (as time.time()) of the
        first such status, and the status.
        """
        began, looked_at = time.monotonic(), 0
        while True:
            for when, body in self._seen[looked_at:]:
                looked_at += 1
                status: Json = body.get("status", {})
                if body["metadata"]["name"] == name and holds(status):
                    return when, status
            if time.monotonic() - began > timeout * slowness():
                last = next((b.get("status") for _, b in reversed(self._seen) if b["metadata"]["name"] == name), None)
                raise AssertionError(
                    f"{name}: no such status within {timeout} s; the last status: {json.dumps(last, indent=1)}"
                )
            time.sleep(0.02)


def restarts(status: Json) -> list[Json]:
    found: list[Json] = status.get("restarts", {}).get("recent", [])
    return found


def restart(reason: str) -> Callable[[Json], bool]:
    return lambda status: any(r["reason"] == reason for r in restarts(status))


def phase(name: str) -> Callable[[Json], bool]:
    return lambda status: status.get("phase") == name

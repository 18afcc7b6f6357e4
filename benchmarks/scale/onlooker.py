"""Watches one namespace in a separate process, in order to see its pods without delay.

In a storm, the process that simulates a thousand kubelets may be half a second late, which would
count as a job's wait.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import suppress
from pathlib import Path

from ddpjob.api.job_spec import Json
from ddpjob.controller.kube.informer import Informer
from ddpjob.controller.kube.rest import Rest
from kubernetes.aio import client, config

NAP = 0.01


class Onlooker:
    """Starts the process and reads its output."""

    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        self._command = (sys.executable, "-m", __name__, str(kubeconfig), namespace)
        self.seen: dict[str, float] = {}
        """When the watch first showed each pod, by name, in monotonic seconds. That clock is the
        same for all processes on a machine."""
        self.late: list[tuple[float, float]] = []
        """When the process should have woken up from a sleep, and by how many seconds it was
        late.
        """

    async def run(self) -> None:
        """Run until cancelled, or until the process ends."""
        process = await asyncio.create_subprocess_exec(*self._command, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                word, value, at = line.decode().split()
                if word == "pod":
                    self.seen.setdefault(value, float(at))
                else:
                    self.late.append((float(at), float(value)))
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _watch(kubeconfig: str, namespace: str) -> None:
    """Print `pod NAME WHEN` for each new pod, and `late SECONDS WHEN` for a late wake-up."""
    settings = client.Configuration()
    await config.load_kube_config(config_file=kubeconfig, client_configuration=settings)
    rest = Rest.open(settings, connections=1)

    def name(body: Json) -> str:
        return str(body["metadata"]["name"])

    def see(before: str | None, now: str | None) -> None:
        if before is None:
            print("pod", now, time.monotonic(), flush=True)

    async def sleep() -> None:
        while True:
            due = time.monotonic() + NAP
            await asyncio.sleep(NAP)
            if (late := time.monotonic() - due) > NAP:
                print("late", late, due, flush=True)

    await asyncio.gather(Informer(rest, f"/api/v1/namespaces/{namespace}/pods", name, see).run(), sleep())


if __name__ == "__main__":
    asyncio.run(_watch(*sys.argv[1:]))

"""The scene of the faults: jobs that train, an operator behind a proxy, and checks for damage."""

from __future__ import annotations

import json
import os
import secrets
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.faults.proxy import Proxy
from benchmarks.testbed import Cluster, Jobs, OperatorProcess, controlplane, install_crd, job, processes, steps_job

Json = dict[str, Any]
TRAINING = ("fast", "standard")


def command_job(name: str, command: str, **spec: Any) -> Json:
    """Return a job with a shell command, in one pod without torch."""
    one = {"nodes": 1, "rendezvous": {"placement": "Master"}, "recovery": {"maxRestarts": 0}}
    made = job(name, **{**one, "command": ["sh", "-c", command], **spec})
    made["spec"]["podTemplate"]["spec"]["terminationGracePeriodSeconds"] = 1
    return made


class Problem(AssertionError):
    """The operator or a job was damaged."""


class Scene:
    """Jobs `fast` and `standard`, which train in one namespace throughout all faults."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.proxy = Proxy(cluster.kubeconfig)
        self.operator = OperatorProcess(cluster, folder / "operator.log")
        self.others: list[OperatorProcess] = []
        self.namespace = self.create_namespace("faults")
        self.jobs = Jobs(cluster, self.namespace)
        self.uids: dict[str, str] = {}
        self.kills: Counter[str] = Counter()
        """Number of each job's pods that were deleted on purpose. Each is one uncounted restart."""
        self._probes = 0
        self._pid: int | None = None

    # --- the operator

    def start_operator(self, operator: OperatorProcess | None = None, **environment: str) -> OperatorProcess:
        started = operator or self.operator
        started.start(KUBECONFIG=str(self.proxy.kubeconfig(self.folder)), **environment)
        assert started.process is not None
        if started is self.operator:
            self._pid = started.process.pid
        return started

    def another_operator(self, name: str) -> OperatorProcess:
        made = OperatorProcess(self.cluster, self.folder / f"{name}.log")
        self.others.append(made)
        return made

    # --- the cluster

    def create_namespace(self, name: str) -> str:
        """Create a namespace, and wait until pods can be created in it."""
        full = f"{name}-{secrets.token_hex(2)}"
        self.cluster.kubectl("create", "namespace", full)
        account = ("get", "serviceaccount", "default", "--namespace", full)
        processes.wait_for(f"the service account of {full}", lambda: self.cluster.succeeds(*account), timeout=30)
        return full

    def signal_program(self, name: str, number: int) -> None:
        """Send a signal to one of the control plane's programs, such as kube-apiserver."""
        found = next(p for p in processes.recorded(self.cluster.settings) if p.name == name)
        os.kill(found.pid, number)

    def restart_api(self, while_down: Callable[[], None]) -> None:
        """Kill the API server, and start it again after `while_down`."""
        self.signal_program("kube-apiserver", signal.SIGKILL)
        while_down()
        controlplane.start_apiserver(self.cluster.settings, self.cluster.programs)
        controlplane.wait_for_api(self.cluster.settings, self.cluster.programs)

    def etcd(self, path: str, body: Json) -> Json:
        """Call etcd's gateway, which listens only in the control plane's network."""
        netns = f"/run/netns/{self.cluster.settings.control_plane_netns}"
        program = (
            "import sys, urllib.request as u; "
            "print(u.urlopen(u.Request(sys.argv[1], sys.argv[2].encode(), method='POST'),"
            " timeout=30).read().decode())"
        )
        address = f"http://127.0.0.1:2379/v3/{path}"
        answer = processes.run("nsenter", f"--net={netns}", "python3", "-c", program, address, json.dumps(body))
        found: Json = json.loads(answer)
        return found

    # --- jobs

    def train(self) -> None:
        """Start the jobs, and wait for their first steps."""
        self.jobs.apply(steps_job("fast", 10**7, recovery={"mode": "Fast"}))
        self.jobs.apply(steps_job("standard", 10**7))
        for name in TRAINING:
            self.jobs.wait_phase(name, "Running", timeout=180)
            self.jobs.wait(f"the first steps of {name}", lambda n=name: self.jobs.step(n) >= 3)  # type: ignore[misc]
        self.uids = self.pods()

    def pods(self) -> dict[str, str]:
        """Return the uids of the training jobs' pods, by name."""
        found = [*self.jobs.pods().items(), *self.jobs.pods("coordinator").items()]
        return {n: p["metadata"]["uid"] for n, p in found if p["metadata"]["labels"]["ddpjob.io/job"] in TRAINING}

    def kill_pod(self, name: str, index: int = 1) -> str:
        """Force-delete the pod of a slot. Return the name that its replacement will have."""
        self.kills[name] += 1
        self.jobs.kill(f"{name}-{index}-{self.kills[name] - 1}")
        return f"{name}-{index}-{self.kills[name]}"

    def wait_pod(self, name: str, timeout: float = 60) -> float:
        """Wait until a pod exists, and return how many seconds that took."""
        return self.jobs.wait(
            f"pod {name}", lambda: self.cluster.succeeds("get", "pod", name, "-n", self.namespace), timeout
        )

    def probe(self, timeout: float = 90) -> float:
        """Create a job, and return the seconds until it has its pod."""
        self._probes += 1
        name = f"probe-{self._probes}"
        self.jobs.apply(command_job(name, "sleep 1"))
        seconds = self.wait_pod(f"{name}-0-0", timeout)
        self.jobs.wait_phase(name, "Complete", timeout=90)
        self.jobs.kubectl("delete", "ddpjob", name, "--wait=false")
        return seconds

    # --- checks

    def check(self) -> None:
        """Check that nothing was damaged. Raises Problem or AssertionError."""
        if self.operator.process is None or self.operator.process.pid != self._pid or not self.operator.running():
            raise Problem("the operator has ended")
        steps = {name: self.jobs.step(name) for name in TRAINING}
        for name in TRAINING:
            self.jobs.wait(f"the complete group of {name}", lambda n=name: self._is_whole(n), timeout=120)  # type: ignore[misc]
            # A restarted script counts from 1 again.
            self.jobs.wait(f"steps of {name}", lambda n=name: self.jobs.step(n) != steps[n], timeout=60)  # type: ignore[misc]
            self._check_job(name)
        now = self.pods()
        again = [name for name in now.keys() & self.uids.keys() if now[name] != self.uids[name]]
        if again:
            raise Problem(f"created twice: {again}")
        self.uids |= now

    def _is_whole(self, name: str) -> bool:
        status = self.jobs.status(name)
        return status["phase"] == "Running" and status["nodes"]["display"] == "2/2"

    def _check_job(self, name: str) -> None:
        status, kills = self.jobs.status(name), self.kills[name]
        restarts = (status["restarts"]["counted"], status["restarts"]["uncounted"])
        attempts = [slot["attempt"] for slot in status["slots"]]
        if restarts != (0, kills) or attempts != [0, kills] or status["rendezvous"]["generation"] != 0:
            raise Problem(
                f"{name}: restarts {restarts}, attempts {attempts}, pods killed: {kills}: {status['restarts']}"
            )

    def close(self) -> None:
        for operator in (self.operator, *self.others):
            operator.kill()
        self.proxy.close()
        self.cluster.kubectl("delete", "namespace", self.namespace, "--wait=false", "--ignore-not-found")
        pods = ("pods", "--all", "--namespace", self.namespace, "--grace-period=1", "--wait=false")
        self.cluster.kubectl("delete", *pods, "--ignore-not-found")


@contextmanager
def scene(cluster: Cluster, folder: Path) -> Iterator[Scene]:
    """Provide jobs that train under their own operator. Everything is removed at the end."""
    install_crd(cluster)
    made = Scene(cluster, folder)
    try:
        made.start_operator()
        made.train()
        yield made
    finally:
        made.close()


def pause(seconds: float) -> None:
    """Sleep for a fault's duration, or longer on a busy machine, where everything is slower."""
    time.sleep(seconds * min(2.0, processes.slowness()))

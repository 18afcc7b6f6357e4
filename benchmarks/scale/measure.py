"""Measures the CPU time and memory of processes, and counts the API server's requests."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ddpjob.controller.kube.rest import Rest

from benchmarks.processes import TICKS, free_port, memory, processor_seconds
from benchmarks.testbed import Cluster, OperatorProcess, recorded

RESOURCES = frozenset(
    (
        "ddpjobs",
        "pods",
        "services",
        "configmaps",
        "secrets",
        "networkpolicies",
        "poddisruptionbudgets",
        "podgroups",
        "events",
        "nodes",
        "persistentvolumeclaims",
    )
)
"""Everything that the operator reads and writes for jobs, which excludes Leases."""


@dataclass(frozen=True)
class Figure:
    """One line of the table."""

    part: str
    what: str
    value: float
    unit: str
    aim: str = ""
    """The aim, such as `<= 1.5` or `>= 1.5`; empty for figures without an aim."""
    beside: str = ""
    """The programs that kept the CPUs busy, or the components of the value."""

    @property
    def reached(self) -> str:
        if not self.aim:
            return ""
        sign, bound = self.aim.split()
        return "yes" if (self.value <= float(bound) if sign == "<=" else self.value >= float(bound)) else "no"


class Operator:
    """The operator's process, as the chart runs it."""

    def __init__(self, process: OperatorProcess, namespaces: tuple[str, ...], lease_namespace: str) -> None:
        self.process = process
        self.metrics_port = free_port()
        self._settings = {
            "DDPJOB_OPERATOR_NAMESPACES": ",".join(namespaces),
            "DDPJOB_OPERATOR_METRICS_PORT": str(self.metrics_port),
            "DDPJOB_OPERATOR_ADDRESS": "127.0.0.1",
            "DDPJOB_OPERATOR_LEASE_NAMESPACE": lease_namespace,
            "DDPJOB_OPERATOR_IDENTITY": "benchmark",
            "DDPJOB_OPERATOR_PEER": '{"podSelector": {}}',
        }
        self._peaks: list[float] = []

    def start(self) -> None:
        self.process.start(**self._settings)

    def forget_peaks(self) -> None:
        """Exclude the memory of the operator's earlier processes from `peak`."""
        self._peaks.clear()

    def kill(self) -> None:
        if self.process.running():
            self._peaks.append(self.memory("VmHWM"))
        self.process.kill()

    @property
    def pid(self) -> int:
        assert self.process.process is not None
        return int(self.process.process.pid)

    def memory(self, what: str = "VmRSS") -> float:
        """Return the operator's memory, as benchmarks.processes.memory does."""
        return memory(self.pid, what)

    def peak(self) -> float:
        """Return the peak in MiB over all of the operator's processes."""
        return max([*self._peaks, self.memory("VmHWM")])


@dataclass(frozen=True)
class Usage:
    """CPU seconds of each group of programs, and the elapsed seconds (`wall`)."""

    wall: float
    operator: float
    control_plane: float
    benchmark: float
    machine: float

    def __sub__(self, other: Usage) -> Usage:
        return Usage(
            self.wall - other.wall,
            self.operator - other.operator,
            self.control_plane - other.control_plane,
            self.benchmark - other.benchmark,
            self.machine - other.machine,
        )

    @property
    def cores(self) -> float:
        """Average number of CPUs used by the operator."""
        return self.operator / self.wall

    def __str__(self) -> str:
        others = max(0.0, self.machine - self.operator - self.control_plane - self.benchmark)
        parts = [("operator", self.operator), ("API server and etcd", self.control_plane)]
        parts += [("benchmark", self.benchmark), ("others", others)]
        return ", ".join(f"{name} {seconds / self.wall:.2f}" for name, seconds in parts)


class Meter:
    """Reads the CPU time of the machine's processes."""

    def __init__(self, cluster: Cluster, operator: Operator) -> None:
        self._operator = operator
        self._control_plane = [p.pid for p in recorded(cluster.settings) if p.name in ("etcd", "kube-apiserver")]

    def read(self) -> Usage:
        return Usage(
            time.monotonic(),
            processor_seconds(self._operator.pid) if self._operator.process.running() else 0.0,
            sum(map(processor_seconds, self._control_plane)),
            time.process_time(),
            _machine(),
        )


def _machine() -> float:
    """Return the busy seconds of all CPUs: user, nice, system, irq, softirq and steal."""
    numbers = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(numbers) - numbers[3] - numbers[4]) / TICKS


async def requests(rest: Rest) -> Counter[tuple[str, str]]:
    """Return how many requests the API server has served, by (verb, resource).

    Only RESOURCES count, without watches.
    """
    response = await rest.api.call_api("GET", f"{rest.api.configuration.host}/metrics", {})
    found: Counter[tuple[str, str]] = Counter()
    for line in (await response.read()).decode().splitlines():
        if not line.startswith("apiserver_request_total{"):
            continue
        labels, _, value = line.partition("{")[2].rpartition("} ")
        values = {name: text.strip('"') for name, _, text in (pair.partition("=") for pair in labels.split(","))}
        if values["resource"] in RESOURCES and values["verb"] != "WATCH":
            resource = "/".join(filter(None, (values["resource"], values["subresource"])))
            found[values["verb"], resource] += round(float(value))
    return found

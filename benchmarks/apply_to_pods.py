"""Measures the time from a DDPJob's creation to its pods and to its first step.

    python -m benchmarks.apply_to_pods MANIFEST --namespace NAMESPACE

Runs on the current kubeconfig's cluster, which must have the operator. MANIFEST contains one DDPJob
that can start in that namespace; its name is not used. There are three figures, all by the client's
clock, starting just before its request:

  apply -> pods    until a watch has reported all pods of the job (nodes and coordinator). The pods name a scheduler
                   that does not exist, so that none starts: only the control plane is measured.
  direct           until a watch has reported the same pods, all created at once by this client without an operator:
                   the API server's own share.
  apply -> step    until the log of node 0's pod has a line that matches --step-pattern.
"""

from __future__ import annotations

import argparse
import copy
import csv
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpjob.client.manifests.manifest_sources import BadInput, read_job
from kubernetes import client, config, watch

Json = dict[str, Any]
GROUP, VERSION, PLURAL = "ddpjob.io", "v1alpha1", "ddpjobs"
NO_SCHEDULER = "nobody"
TIMEOUT = 120.0
"""Seconds after which a run counts as failed."""


class BenchmarkError(Exception):
    """A run did not finish; the message says how far it got."""


@dataclass(frozen=True)
class Sample:
    """One measurement. `pods` is the number of pods whose creation was awaited."""

    what: str
    nodes: int
    pods: int
    run: int
    seconds: float


class PodWatch:
    """A namespace's pods, as reported by a watch that began before the first request."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._pods: dict[str, Json] = {}
        self._changed = threading.Condition()
        self._watch = watch.Watch()
        self._ended: Exception | None = None
        listed = client.CoreV1Api().list_namespaced_pod(namespace)
        self._version = listed.metadata.resource_version
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        api = client.CoreV1Api()
        try:
            for event in self._watch.stream(api.list_namespaced_pod, self._namespace, resource_version=self._version):
                self._take(event["type"], event["raw_object"])
        except Exception as error:  # If the watch ends for any reason, `wait` ends too.
            with self._changed:
                self._ended = error
                self._changed.notify_all()

    def _take(self, kind: str, pod: Json) -> None:
        with self._changed:
            if kind == "DELETED":
                self._pods.pop(pod["metadata"]["name"], None)
            else:
                self._pods[pod["metadata"]["name"]] = pod
            self._changed.notify_all()

    def wait(self, what: str, ready: Callable[[dict[str, Json]], bool]) -> dict[str, Json]:
        """Return the pods once `ready(pods)` is true.

        Raises BenchmarkError after TIMEOUT, or if the watch has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ended or ready(self._pods), TIMEOUT)
            if self._ended is not None:
                raise BenchmarkError(f"the watch on pods of {self._namespace} has ended") from self._ended
            if not ready(self._pods):
                raise BenchmarkError(
                    f"timed out after {TIMEOUT:.0f} s: {what}; pods of {self._namespace}:"
                    f" {', '.join(self._pods) or 'none'}"
                )
            return dict(self._pods)

    def now(self) -> dict[str, Json]:
        """Return the pods as last reported."""
        with self._changed:
            return dict(self._pods)

    def close(self) -> None:
        self._watch.stop()


class Bench:
    """Runs of one manifest in one namespace."""

    def __init__(self, manifest: Json, namespace: str) -> None:
        self.manifest, self.namespace = manifest, namespace
        self.core, self.jobs = client.CoreV1Api(), client.CustomObjectsApi()
        self.watch = PodWatch(namespace)

    def job(self, name: str, nodes: int, **scheduling: Any) -> Json:
        job = copy.deepcopy(self.manifest)
        job["metadata"] = {"name": name, "namespace": self.namespace}
        job["spec"]["nodes"] = nodes
        job["spec"].setdefault("scheduling", {}).update(scheduling)
        job.pop("status", None)
        return job

    def apply_to_pods(self, run: int, nodes: int) -> tuple[Sample, list[Json]]:
        """Measure the time from a job's creation to its pods, and return the sample and the
        pods.
        """
        job = self.job(f"bench-{run}", nodes, schedulerName=NO_SCHEDULER)
        wanted = nodes + (job["spec"]["rendezvous"]["placement"] == "Dedicated")
        with self._applied(job) as began:
            pods = self.watch.wait(f"{wanted} pods of the job", lambda pods: len(pods) == wanted)
            sample = Sample("apply -> pods", nodes, wanted, run, time.perf_counter() - began)
        return sample, list(pods.values())

    def direct(self, run: int, nodes: int, pods: Iterable[Json]) -> Sample:
        """Create the same pods, with all requests at once."""
        bare = [_bare(pod) for pod in pods]
        with ThreadPoolExecutor(len(bare)) as pool:
            # Open the connections first, because the operator's connections are open too.
            list(pool.map(lambda _: self.core.get_api_resources(), bare))
            began = time.perf_counter()
            list(pool.map(lambda pod: self.core.create_namespaced_pod(self.namespace, pod), bare))
            self.watch.wait(f"{len(bare)} pods created directly", lambda seen: len(seen) == len(bare))
            seconds = time.perf_counter() - began
        self._clean()
        return Sample("direct", nodes, len(bare), run, seconds)

    def apply_to_step(self, run: int, nodes: int, pattern: re.Pattern[str]) -> Sample:
        """Measure the time from creating a job until node 0's log shows its first step."""
        name = f"bench-step-{run}"
        with self._applied(self.job(name, nodes)) as began:
            pod = f"{name}-0-0"
            self.watch.wait(f"the container of {pod} runs", lambda pods: _is(pods.get(pod), "running", "terminated"))
            running = True
            while running:  # A kubelet may end a log just after its container has started.
                running = _is(self.watch.now().get(pod), "running")
                for line in watch.Watch().stream(
                    self.core.read_namespaced_pod_log, pod, self.namespace, container="trainer"
                ):
                    if pattern.search(line):
                        return Sample("apply -> step", nodes, 0, run, time.perf_counter() - began)
                time.sleep(0.1)
        raise BenchmarkError(
            f"the log of {pod} ended without a line that matches {pattern.pattern!r}; set a different --step-pattern"
        )

    @contextmanager
    def _applied(self, job: Json) -> Iterator[float]:
        """Create a job for the duration of the `with` block.

        Yields the time just before its creation.
        """
        began = time.perf_counter()
        self.jobs.create_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL, job)
        try:
            yield began
        finally:
            self.jobs.delete_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL, job["metadata"]["name"])
            # Wait for the garbage collector. Otherwise the operator would replace pods that
            # terminate before it knows that the job is gone.
            self.watch.wait("the job's pods are being deleted", lambda pods: all(_ending(pod) for pod in pods.values()))
            self._clean()

    def _clean(self) -> None:
        self.core.delete_collection_namespaced_pod(self.namespace, grace_period_seconds=0)
        self.watch.wait("the pods are gone", lambda pods: not pods)


def _bare(pod: Json) -> Json:
    """Return the pod as a user would write it, without an owner and the API server's own fields."""
    meta = {key: pod["metadata"][key] for key in ("name", "namespace", "labels")}
    spec = {
        key: value
        for key, value in pod["spec"].items()
        if key not in ("serviceAccount", "priority", "preemptionPolicy")
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


def _ending(pod: Json) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def _is(pod: Json | None, *states: str) -> bool:
    """Whether the trainer's container is in one of these states."""
    statuses = (pod or {}).get("status", {}).get("containerStatuses", ())
    return any(status["name"] == "trainer" and not status["state"].keys().isdisjoint(states) for status in statuses)


def measure(bench: Bench, nodes: int, runs: int, step_runs: int, pattern: re.Pattern[str]) -> list[Sample]:
    """Measure all runs. The first run of each kind is not counted.

    Direct and applied runs alternate, so that load affects both.
    """
    samples: list[Sample] = []
    for run in range(runs + 1 if runs else 0):
        sample, pods = bench.apply_to_pods(run, nodes)
        samples += [sample, bench.direct(run, nodes, pods)]
    for run in range(step_runs + 1 if step_runs else 0):
        samples.append(bench.apply_to_step(run, nodes, pattern))
    return [s for s in samples if s.run > 0]


def table(samples: list[Sample]) -> str:
    """Return medians, worst values, and the ratio to the time without the operator."""
    lines = [f"{'what':<16}{'nodes':>6}{'pods':>6}{'runs':>6}{'median s':>10}{'worst s':>10}"]
    groups: dict[tuple[str, int, int], list[float]] = {}
    for sample in samples:
        groups.setdefault((sample.what, sample.nodes, sample.pods), []).append(sample.seconds)
    for (what, nodes, pods), seconds in groups.items():
        figures = f"{len(seconds):>6}{statistics.median(seconds):>10.3f}{max(seconds):>10.3f}"
        lines.append(f"{what:<16}{nodes:>6}{pods or '':>6}{figures}")
    for (what, nodes, pods), seconds in groups.items():
        if what == "direct":
            ratio = statistics.median(groups["apply -> pods", nodes, pods]) / statistics.median(seconds)
            lines.append(f"{nodes} nodes: {ratio:.1f} times as long as creating the same pods directly")
    return "\n".join(lines)


def write_csv(path: Path, samples: list[Sample]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["what", "nodes", "pods", "run", "seconds"])
        writer.writerows([s.what, s.nodes, s.pods, s.run, f"{s.seconds:.4f}"] for s in samples)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("manifest", type=Path, metavar="MANIFEST")
    made.add_argument("--namespace", default="default", help="an existing namespace without pods (default: default)")
    made.add_argument(
        "--nodes", type=int, nargs="+", default=[2], help="numbers of nodes for apply -> pods (default 2)"
    )
    made.add_argument("--runs", type=int, default=20, help="runs of apply -> pods and of direct (default 20)")
    made.add_argument(
        "--step-runs", type=int, default=5, help="runs of apply -> step, with the smallest of --nodes (default 5)"
    )
    made.add_argument(
        "--step-pattern",
        default=r"\bstep 1\b",
        metavar="REGEX",
        help=r"pattern of the log line of the first step (default \bstep 1\b)",
    )
    made.add_argument("--csv", type=Path, metavar="FILE", help="write every measurement to this file")
    return made


def main() -> int:
    """Return 0 if all runs were measured, 1 if a run failed, 2 on bad input."""
    arguments = parser().parse_args()
    try:
        manifest = read_job(arguments.manifest)
        pattern = re.compile(arguments.step_pattern)
    except (BadInput, re.error) as error:
        print(error, file=sys.stderr)
        return 2
    config.load_kube_config()
    found = client.CoreV1Api().list_namespaced_pod(arguments.namespace).items
    if found:
        print(
            f"--namespace {arguments.namespace}: contains pods, such as {found[0].metadata.name}; choose an empty"
            " namespace",
            file=sys.stderr,
        )
        return 2
    bench = Bench(manifest, arguments.namespace)
    samples: list[Sample] = []
    try:
        for nodes in sorted(arguments.nodes):
            samples += measure(
                bench, nodes, arguments.runs, arguments.step_runs if nodes == min(arguments.nodes) else 0, pattern
            )
    except BenchmarkError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        bench.watch.close()
    print(table(samples))
    if arguments.csv:
        write_csv(arguments.csv, samples)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Hosts, a scheduler and kubelets. They start processes for the pods in the store, and write the
pods' states back.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from ddpjob.core.world import LABEL_ATTEMPT, LABEL_GENERATION, LABEL_INDEX, LABEL_ROLE, NODE_ROLES, Role

from .clock import Clock, stamp
from .coordinator import CoordinatorProcess
from .launcher import Launcher
from .network import Network
from .store import Json, Store
from .training import Training

GARBAGE_SECONDS = 40.0


@dataclass(eq=False)
class Host:
    """A machine. If `cut` is true, it is partitioned from everything else while its containers
    continue to run.
    """

    name: str
    body: Json
    cut: bool = False
    mute: bool = False
    """Whether its kubelet is dead. Its containers continue to run, and stay reachable."""
    ill: bool = False
    """Whether a health agent calls it unhealthy."""
    generation: int = 0
    """The number of partitions so far, so that plans made for an earlier one can be dropped."""

    @property
    def silent(self) -> bool:
        """Whether the host and the API server cannot reach each other."""
        return self.cut or self.mute


@dataclass(eq=False)
class Container:
    """The kubelet's record of one container."""

    manifest: Json
    process: Launcher | CoordinatorProcess | None = None
    started: float | None = None
    exit_code: int | None = None
    reason: str = ""
    message: str = ""
    finished: float | None = None

    def status(self) -> Json:
        if self.exit_code is not None:
            state: Json = {
                "terminated": {
                    "exitCode": self.exit_code,
                    "reason": self.reason,
                    "message": self.message,
                    "startedAt": stamp(self.started or 0.0),
                    "finishedAt": stamp(self.finished or 0.0),
                }
            }
        elif self.started is not None:
            state = {"running": {"startedAt": stamp(self.started)}}
        else:
            state = {"waiting": {"reason": "ContainerCreating"}}
        return {"name": self.manifest["name"], "state": state}


NOWHERE = Host("", {})


@dataclass(eq=False)
class Pod:
    """A pod as its kubelet knows it. On a partitioned host it may outlive its object."""

    body: Json
    born: float
    host: Host = NOWHERE
    containers: dict[str, Container] = field(default_factory=dict)
    isolated: bool = False
    """Whether the pod's own network is broken while its host's works."""
    deaf: bool = False
    """Whether other pods cannot reach it. The operator still can."""
    removed: bool = False
    """Whether its object is gone."""
    address: str = ""
    terminating: bool = False
    seen_running: bool = False

    @property
    def name(self) -> str:
        return str(self.body["metadata"]["name"])

    @property
    def uid(self) -> str:
        return str(self.body["metadata"]["uid"])

    @property
    def node(self) -> str:
        return self.host.name

    def label(self, key: str) -> int:
        return int(self.body["metadata"]["labels"].get(key, 0))

    @property
    def index(self) -> int:
        return self.label(LABEL_INDEX)

    @property
    def attempt(self) -> int:
        return self.label(LABEL_ATTEMPT)

    @property
    def generation(self) -> int:
        return self.label(LABEL_GENERATION)

    @property
    def role(self) -> Role:
        return Role(self.body["metadata"]["labels"][LABEL_ROLE])

    @property
    def is_node(self) -> bool:
        return self.role in NODE_ROLES

    @property
    def main(self) -> Container:
        return self.containers["trainer" if self.is_node else "coordinator"]

    @property
    def running(self) -> bool:
        """Whether the container that decides the pod's state runs."""
        return bool(self.containers) and self.main.started is not None and self.main.exit_code is None

    @property
    def ended(self) -> bool:
        """Whether the container that decides the pod's state has ended."""
        return bool(self.containers) and self.main.exit_code is not None

    @property
    def state(self) -> str:
        return "Ended" if self.ended else "Running" if self.running else "Pending"

    @property
    def deleting(self) -> bool:
        return "deletionTimestamp" in self.body["metadata"]

    @property
    def launcher(self) -> Launcher | None:
        process = self.containers["trainer"].process if "trainer" in self.containers else None
        return process if isinstance(process, Launcher) else None

    @property
    def coordinator(self) -> CoordinatorProcess | None:
        process = self.containers["coordinator"].process if "coordinator" in self.containers else None
        return process if isinstance(process, CoordinatorProcess) else None

    def argument(self, name: str) -> str:
        """Return the value of an argument of the coordinator's container."""
        args = self.containers["coordinator"].manifest["args"]
        return next(str(a).partition("=")[2] for a in args if a.startswith(f"--{name}="))


class Machines:
    """The hosts, and every pod on them."""

    def __init__(
        self, store: Store, network: Network, training: Training, chance: random.Random, hosts: int = 8
    ) -> None:
        self.clock: Clock = store.clock
        self.store, self.network, self.training, self.random = store, network, training, chance
        self.capacity = 10**6
        """Number of pods of slots that can get a host. The others stay Pending."""
        self.favourite: dict[int, str] = {}
        """Hosts that the scheduler prefers for pods of an index."""
        self.address: Callable[[int], str] = lambda number: f"10.1.{number}.1"
        self.faults: Callable[[Pod], tuple[str | int, str] | None] = lambda pod: None
        """Why a pod's containers do not start on its host: a kubelet's reason and message, or an
        exit code and a log.
        """
        self.saves = False
        """Whether the script saves when it is asked to stop."""
        self.skew = 0.0
        self.slow_stop = 0.0
        self.on_pod: Callable[[Pod], None] = lambda pod: None
        self.pods: dict[str, Pod] = {}
        """Pods by uid, as long as any container of them is left."""
        self.hosts: dict[str, Host] = {}
        self._addresses = itertools.count(1)
        for number in range(hosts):
            self.add_host(f"n{number}")
        store.watchers.append(self._observe)

    def add_host(self, name: str) -> None:
        """Add a machine to the cluster."""
        body = self.store.create("Node", {"metadata": {"name": name}, "spec": {}, "status": {}}, namespace="")
        host = self.hosts[name] = Host(name, body)
        self._say_ready(host, True)

    def diagnose(self, host: Host, ill: bool) -> None:
        """Set the verdict that the health agent reports from now on."""
        host.ill = ill
        self._say_ready(host, self._is_ready(host))

    def label(self, host: Host, **labels: str) -> None:
        """Set a label, as `kubectl label` does. An empty value removes it."""
        merged = {**host.body["metadata"].get("labels", {}), **labels}
        host.body["metadata"]["labels"] = {name: value for name, value in merged.items() if value}
        self.store.changed("Node", host.body)

    def cordon(self, host: Host) -> None:
        """Keep new pods away, as `kubectl cordon` does."""
        host.body["spec"]["unschedulable"] = True
        self.store.changed("Node", host.body)

    def _say_ready(self, host: Host, ready: bool) -> None:
        body = self.store.find("Node", host.name, "")
        if body is None:
            return
        now = self.clock.stamp()
        condition = {"type": "Ready", "status": "True" if ready else "Unknown", "lastTransitionTime": now}
        agent = {"type": "GpuUnhealthy", "status": str(host.ill), "reason": "XidError", "lastTransitionTime": now}
        body["status"] = {"conditions": [condition, agent]}
        self.store.changed("Node", body)

    # ---- from the API server

    def _observe(self, kind: str, what: str, body: Json) -> None:
        if kind != "Pod":
            return
        uid = body["metadata"]["uid"]
        if what == "ADDED":
            pod = self.pods[uid] = Pod(body, self.clock.now)
            self.clock.later(self.network.draw("schedule"), lambda: self._schedule(pod))
        elif what == "DELETED":
            gone = self.pods.get(uid)
            if gone is not None:
                gone.removed = True
                self._kill_if_reachable(gone)
        elif "deletionTimestamp" in body["metadata"]:
            ending = self.pods.get(uid)
            if ending is not None:
                self._terminate_if_reachable(ending)

    def _schedule(self, pod: Pod) -> None:
        """Choose the ready host with the fewest pods, and an avoided host only if there is no
        other.
        """
        if pod.removed or pod.deleting:
            return
        if pod.body["spec"].get("schedulingGates"):
            message = "Scheduling is blocked due to non-empty scheduling gates"
            condition = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": message}
            pod.body["status"] = {"phase": "Pending", "conditions": [condition]}
            self.clock.later(1.0, lambda: self._schedule(pod))
            return
        taken = sum(p.is_node and p.host is not NOWHERE and not p.ended and not p.removed for p in self.pods.values())
        ready = [h for h in self.hosts.values() if self._is_ready(h)]
        lacking = "" if not ready else self._lacking(pod, taken)
        if not ready or lacking:
            message = lacking or f"0/{len(self.hosts)} nodes are available"
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
            if pod.body.get("status", {}).get("conditions") != [condition]:
                pod.body["status"] = {"phase": "Pending", "conditions": [condition]}
                self.store.changed("Pod", pod.body)
            self.clock.later(1.0, lambda: self._schedule(pod))
            return
        affinity = pod.body["spec"].get("affinity", {}).get("nodeAffinity", {})
        preferred = affinity.get("preferredDuringSchedulingIgnoredDuringExecution", ())
        avoided = {v for term in preferred for f in term["preference"]["matchFields"] for v in f["values"]}
        load = {h.name: 0 for h in ready}
        for other in self.pods.values():
            if not other.ended and other.host.name in load:
                load[other.host.name] += 1
        favourite = self.favourite.get(pod.index) if pod.is_node else None
        far = {name: self._far(pod, self.hosts[name]) for name in load}
        pod.host = self.hosts[
            min(load, key=lambda name: (name in avoided, name != favourite, far[name], load[name], name))
        ]
        pod.body["spec"]["nodeName"] = pod.host.name
        pod.body["status"] = {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "True"}]}
        self.store.changed("Pod", pod.body)
        self.clock.later(self.network.draw("start"), lambda: self._start(pod))

    def _far(self, pod: Pod, host: Host) -> bool:
        """Whether the pod prefers to share a topology domain with the job's other pods, but the
        host's domain has none of them.
        """
        affinity = pod.body["spec"].get("affinity", {}).get("podAffinity", {})
        terms = affinity.get("preferredDuringSchedulingIgnoredDuringExecution", ())
        keys = [term["podAffinityTerm"]["topologyKey"] for term in terms]
        placed = [p.host for p in self.pods.values() if p.is_node and p.host is not NOWHERE and not p.removed]
        labels = host.body["metadata"].get("labels", {})
        return any(labels.get(k) not in [h.body["metadata"].get("labels", {}).get(k) for h in placed] for k in keys)

    def _lacking(self, pod: Pod, taken: int) -> str:
        """Return the reason why a pod finds no host, in kube-scheduler's words, or an empty string.

        The pods of a PodGroup are placed together, as soon as its minimum number exists and they
        all fit.
        """
        room = self.capacity - taken
        full = f"0/{len(self.hosts)} nodes are available" if pod.is_node and room <= 0 else ""
        name = pod.body["spec"].get("schedulingGroup", {}).get("podGroupName")
        if name is None:
            return full
        group = self.store.find("PodGroup", name)
        if group is None:
            return f"waiting for pod group {name}"
        least = group["spec"]["schedulingPolicy"]["gang"]["minCount"]
        members = [
            p
            for p in self.pods.values()
            if p.body["spec"].get("schedulingGroup", {}).get("podGroupName") == name and not p.removed and not p.ended
        ]
        waiting = [p for p in members if p.host is NOWHERE and not p.deleting]
        placed = sum(p.host is not NOWHERE for p in members)
        fitting = min(room, sum(p.is_node for p in waiting)) + sum(not p.is_node for p in waiting)
        if len(members) < least:
            return "waiting for minCount pods from a gang to appear in scheduling queue"
        if placed + fitting < least:
            return full or "waiting for minCount pods from a gang to be scheduled"
        return full

    def _is_ready(self, host: Host) -> bool:
        body = self.store.find("Node", host.name, "")
        return body is not None and body["status"]["conditions"][0]["status"] == "True"

    # ---- kubelets

    def _start(self, pod: Pod) -> None:
        if pod.removed or pod.terminating or pod.containers or pod.deleting:
            return
        if pod.host.silent:
            self.clock.later(1.0, lambda: self._start(pod))
            return
        missing = self._missing_secret(pod)
        if missing:
            self._hold(pod, "CreateContainerConfigError", f'secret "{missing}" not found')
            return
        fault = self.faults(pod)
        if fault is not None and isinstance(fault[0], str):
            self._hold(pod, fault[0], fault[1])
            return
        pod.address = self.address(next(self._addresses))
        if fault is not None:
            for manifest in pod.body["spec"]["containers"]:
                pod.containers[manifest["name"]] = container = Container(manifest, started=self.clock.now)
                container.exit_code, container.reason, container.message = int(fault[0]), "Error", fault[1]
                container.finished = self.clock.now
            self._write(pod)
            return
        for manifest in pod.body["spec"]["containers"]:
            manifest = {**manifest, "env": [self._variable(entry) for entry in manifest["env"]]}
            container = pod.containers[manifest["name"]] = Container(manifest, started=self.clock.now)

            def ended(code: int, message: str, container: Container = container) -> None:
                self._ended(pod, container, code, message)

            if manifest["name"] == "coordinator":
                container.process = CoordinatorProcess(self.network, pod, manifest, ended, self.skew)
            else:
                container.process = Launcher(self.network, self.training, pod, manifest, ended)
        self.on_pod(pod)
        self._write(pod)

    def _missing_secret(self, pod: Pod) -> str:
        entries = (entry for manifest in pod.body["spec"]["containers"] for entry in manifest["env"])
        references = (entry.get("valueFrom", {}).get("secretKeyRef") for entry in entries)
        return next((r["name"] for r in references if r and self.store.find("Secret", r["name"]) is None), "")

    def _hold(self, pod: Pod, reason: str, message: str) -> None:
        """Fail to create the pod's containers, and retry a second later."""
        state = {"waiting": {"reason": reason, "message": message}}
        statuses = [{"name": manifest["name"], "state": state} for manifest in pod.body["spec"]["containers"]]
        if pod.body["status"].get("containerStatuses") != statuses:
            pod.body["status"] = {**pod.body["status"], "containerStatuses": statuses}
            self.store.changed("Pod", pod.body)
        self.clock.later(1.0, lambda: self._start(pod))

    def _variable(self, entry: Json) -> Json:
        """Resolve a variable from its Secret, which must exist when the container starts."""
        reference = entry.get("valueFrom", {}).get("secretKeyRef")
        if reference is None:
            return entry
        return {
            "name": entry["name"],
            "value": self.store.get("Secret", reference["name"])["stringData"][reference["key"]],
        }

    def _ended(self, pod: Pod, container: Container, code: int, message: str) -> None:
        if container.exit_code is not None:
            return
        self.network.say(f"{pod.name}: container {container.manifest['name']} ends with {code} {message[:80]}")
        reason = "Completed" if code == 0 else "Error"
        if message == "OOMKilled":
            reason, message = "OOMKilled", ""
        container.exit_code, container.reason, container.message = code, reason, message
        container.finished = self.clock.now
        self._write(pod)
        if pod.terminating and all(c.exit_code is not None for c in pod.containers.values()):
            self._forget(pod)

    def _write(self, pod: Pod) -> None:
        """Write the pod's status as soon as the kubelet reaches the API server."""
        delay = self.network.draw("update")
        if delay:
            self.clock.later(delay, lambda: self._write_now(pod))
        else:
            self._write_now(pod)

    def _write_now(self, pod: Pod) -> None:
        if pod.removed or pod.host.silent or not pod.containers:
            return
        containers = list(pod.containers.values())
        phase = "Running"
        if all(c.exit_code is not None for c in containers):
            phase = "Succeeded" if all(c.exit_code == 0 for c in containers) else "Failed"
        status = {
            "phase": phase,
            "podIP": pod.address,
            "conditions": [{"type": "PodScheduled", "status": "True"}],
            "containerStatuses": [c.status() for c in containers],
        }
        if pod.body.get("status") != status:
            pod.body["status"] = status
            self.store.changed("Pod", pod.body)

    def _terminate_if_reachable(self, pod: Pod) -> None:
        """Send SIGTERM, then SIGKILL after the grace period, then remove the object."""
        if pod.terminating or pod.host.silent or pod.host is NOWHERE:
            return
        pod.terminating = True
        if not pod.containers:
            self._forget(pod)
            return
        grace = float(pod.body["metadata"].get("deletionGracePeriodSeconds", 30))
        self.clock.later(grace, lambda: self._kill(pod))
        for container in pod.containers.values():
            if isinstance(container.process, CoordinatorProcess) and container.exit_code is None:
                container.process.stop(143)
            elif isinstance(container.process, Launcher) and container.exit_code is None:
                container.process.terminate(self.saves)
        if all(c.exit_code is not None for c in pod.containers.values()):
            self._forget(pod)

    def _kill(self, pod: Pod) -> None:
        for container in pod.containers.values():
            if container.process is not None and container.exit_code is None:
                container.process.kill()
                self._ended(pod, container, 137, "")

    def _kill_if_reachable(self, pod: Pod) -> None:
        """Handle the removal of the object: kill every container that is left."""
        if pod.host.silent:
            return
        for container in pod.containers.values():
            if container.process is not None:
                container.process.kill()
            if container.exit_code is None:
                container.exit_code, container.finished = 137, self.clock.now
        self.pods.pop(pod.uid, None)

    def _forget(self, pod: Pod) -> None:
        """Confirm the end of a pod that was being deleted."""

        def confirm() -> None:
            if not pod.removed and not pod.host.silent:
                self.store.remove("Pod", pod.body)

        self.clock.later(self.network.draw("update") + 0.01, confirm)

    # ---- faults

    def cut(self, host: Host, noticed_after: float | None) -> None:
        """Cut the host's network. Its Ready condition shows it after `seconds` (None: never)."""
        host.cut = True
        host.generation += 1
        self.network.changed()
        if noticed_after is not None:
            generation = host.generation

            def tell() -> None:
                if host.cut and host.generation == generation:
                    self._say_ready(host, False)

            self.clock.later(noticed_after, tell)

    def silence(self, host: Host, noticed_after: float) -> None:
        """Kill the host's kubelet. The node becomes NotReady after `noticed_after` seconds."""
        host.mute = True
        host.generation += 1
        generation = host.generation

        def tell() -> None:
            if host.mute and host.generation == generation:
                self._say_ready(host, False)

        self.clock.later(noticed_after, tell)

    def heal(self, host: Host) -> None:
        """Repair the host's network, or start its kubelet again, which then catches up."""
        if not host.silent or self.store.find("Node", host.name, "") is None:
            return
        host.cut = host.mute = False
        host.generation += 1
        self.network.changed()
        if not self._is_ready(host):
            self._say_ready(host, True)
        for pod in [p for p in self.pods.values() if p.host is host]:
            if pod.removed:
                self._kill_if_reachable(pod)
            else:
                if pod.deleting:
                    self._terminate_if_reachable(pod)
                self._write(pod)
                if pod.terminating and pod.containers and all(c.exit_code is not None for c in pod.containers.values()):
                    self._forget(pod)

    def lose(self, host: Host) -> None:
        """Switch the machine off. Everything on it ends, and nothing reports it."""
        for pod in [p for p in self.pods.values() if p.host is host]:
            for container in pod.containers.values():
                if container.process is not None:
                    container.process.kill()
                if container.exit_code is None:
                    container.exit_code, container.reason, container.finished = 255, "Unknown", self.clock.now

    def delete_host(self, host: Host) -> None:
        """Switch the machine off for good and delete its node object.

        The garbage collector removes its pods a while later.
        """
        self.cut(host, None)
        self.lose(host)
        self.store.delete("Node", host.name, namespace="")

        def collect() -> None:
            for pod in [p for p in self.pods.values() if p.host is host and not p.removed]:
                self.store.remove("Pod", pod.body)

        self.clock.later(GARBAGE_SECONDS, collect)

    def isolate(self, pod: Pod, seconds: float) -> None:
        """Break the pod's own network for a while."""
        pod.isolated = True
        self.network.changed()

        def heal() -> None:
            pod.isolated = False
            self.network.changed()

        self.clock.later(seconds, heal)

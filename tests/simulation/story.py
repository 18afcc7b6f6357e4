"""A random story, determined by its seed.

A job in a slow or quick world meets faults at random moments. Then the faults stop, and the job
must complete.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from unittest import mock

from ddpjob.core.failures import node_health
from ddpjob.core.world import Role
from ddpjob.objects.platform import Platform

from .invariants import Violation
from .kubelet import Pod
from .network import Pace
from .simulated import Simulation, conditions
from .store import Json

APART = 14.0
"""Seconds without other faults before and after a failure of a running job. Such a failure
certainly counts.
"""
CALM_SECONDS = 900.0
"""How long a job without faults may take to finish, in seconds."""
TAKES: dict[str, Pace] = {
    "calm": Pace(),
    "quick": Pace(
        message=(0.001, 0.02),
        start=(0.2, 0.6),
        boot=(0.05, 0.5),
        join=(0.05, 0.4),
        drain=(0.02, 0.3),
        notice=(0.01, 0.2),
        update=(0.01, 0.3),
        schedule=(0.01, 0.1),
    ),
    "slow": Pace(
        message=(0.005, 0.4),
        start=(0.5, 4),
        boot=(0.5, 6),
        listen=(0.1, 2),
        join=(0.2, 3),
        drain=(0.05, 2.5),
        notice=(0.01, 2),
        update=(0.05, 2.5),
        schedule=(0.05, 1),
    ),
}


@dataclass
class Looks:
    """How often the operator reconciles, by polling and by watches: (least, most) seconds."""

    poll: tuple[float, float]
    watch: tuple[float, float]


class Story:
    """The story of one seed."""

    left_out: frozenset[str] = frozenset({"kubelet", "agent"})
    """Kinds of faults that are not played. Faults of kubelets have separate seeds, because pods
    without a kubelet receive no signals. So do faults of health agents, for which the operator
    waits less long than in production.
    """
    only: tuple[str, ...] = ()
    """The only faults to play. Empty means all."""

    def __init__(self, seed: int, *, trace: bool = False, simulation: type[Simulation] = Simulation) -> None:
        self.seed = seed
        self.random = chance = random.Random(seed)
        self.pace = chance.choice(list(TAKES))
        self.looks = chance.choice(
            (Looks((0.7, 1.3), (0.02, 0.1)), Looks((1, 3), (0.05, 0.5)), Looks((2, 5), (0.1, 1.5)))
        )
        self.spec, self.bounds = _random_spec(chance)
        reports = chance.random() < 0.8
        if not reports:  # this script reports nothing, so a hang cannot be seen
            del self.spec["recovery"]["hangAfterSeconds"]
        self.s = s = simulation(self.spec, steps=10**9, pace=TAKES[self.pace], chance=chance, trace=trace)
        s.machines.saves = chance.random() < 0.5
        s.machines.skew = chance.choice((0.0, 0.0, -0.8, 0.8))
        s.training.progress = reports
        s.cluster.knows_hosts = chance.random() < 0.8
        s.store.watchers.append(self._observe)
        s.cluster.on_conflict = self._other_writer
        self.length = chance.choice((15, 30, 30, 45))
        self.often = chance.choice((2.0, 5.0, 12.0, 25.0))
        """Mean seconds between two faults."""
        self.look_at = 0.0
        self.gap_until = self.down_until = 0.0
        self.lossy_until = -1.0
        self.hung_until = -1.0
        self.healthy_since = 0.0
        self.own = 0
        """Number of caused failures that count as the job's own."""
        self.certain = 0
        self.replaced: set[str] = set()
        """Pods that were replaced for their failures. The last failure of each may not have
        counted.
        """
        self._candidate: float | None = None
        self.last_fault = -APART
        self.faults: Counter[str] = Counter()
        self.fatal = False
        """Whether a fault has occurred that may fail the job immediately."""
        self.reconciles = 0
        self.calm = False

    # ---- the operator

    def _observe(self, kind: str, what: str, body: Json) -> None:
        """Deliver a change by a watch: immediately, late, or never."""
        if kind not in ("Pod", "Node", "DDPJob") or self.s.now < self.gap_until:
            return
        if kind == "DDPJob" and self.random.random() < 0.8:
            return  # the operator's own writes wake it too, without effect
        delay = self.random.uniform(*self.looks.watch)
        when = self.s.now + delay
        self.look_at = min(self.look_at, when)
        self.s.clock.later(delay, self.s.cluster.changed)

    async def _run(self, until: float) -> None:
        s = self.s
        while s.now < until:
            if self.look_at > s.now:
                s.clock.step(min(self.look_at, until))
                continue
            self.look_at = s.now + self.random.uniform(*self.looks.poll)
            if s.now < self.down_until:
                self.look_at = self.down_until
                continue
            await self._reconcile()
            if s.wake is not None and s.wake < 1:
                self.look_at = min(self.look_at, s.now + s.wake)

    async def _reconcile(self) -> None:
        s = self.s
        self.reconciles += 1
        if not await s.one_pass(fresh=False):
            self.down_until = s.now + self.random.choice((0.1, 1.0, 4.0))
            self.healthy_since = self.down_until
            return
        if s.job is None:
            return
        recent = s.status.get("restarts", {}).get("recent", ())
        self.replaced |= {restart["pod"] for restart in recent if restart["reason"] == "PodUnhealthy"}
        fresh = s.now >= self.gap_until and s.now >= self.lossy_until
        if fresh:
            stale = (
                self.looks.watch[1] + s.network.pace.update[1] + s.network.pace.notice[1] + s.network.pace.message[1]
            )
            hangs = any(r.hung and not r.broken for r in s.training.rounds.values())
            s.invariants.running_is_true(stale, hang=hangs or s.now < self.hung_until)
        if self.random.random() < 0.05:
            await self._idempotent()

    async def _idempotent(self) -> None:
        """Check that a second reconcile of the same world has no further effect, apart from
        messages to the coordinator.
        """
        s = self.s
        if s.cluster.lose_reports:
            return  # the world differs at each reconcile
        s.cluster.die_at = ()
        for _ in range(4):
            if not await s.one_pass():
                return
            actions = [a for a in s.cluster.actions if not a.startswith("posts")]
            if not actions:
                return
        raise Violation(f"at {s.now:.3f} s: each reconcile acts again in an unchanged world: {actions}")

    def _other_writer(self) -> None:
        """Write the job between the operator's read and its write."""
        meta = self.s.job_body["metadata"]
        meta["annotations"] = {"touched": str(self.s.now)}
        self.s.store.changed("DDPJob", self.s.job_body)

    # ---- the faults

    async def run(self) -> None:
        """Play the story. Raises Violation, or a different AssertionError."""
        s = self.s
        next_fault = self.random.uniform(0, 10)
        while s.now < self.length:
            await self._run(min(next_fault, self.length))
            if s.now >= next_fault:
                self._strike()
                next_fault = s.now + self.random.expovariate(1 / self.often)
            if s.phase in ("Complete", "Failed"):
                break
        await self._end()

    def _strike(self) -> None:
        names = [name for name in self.only or FAULTS if name not in self.left_out]
        for _ in range(5):
            name = self.random.choices(names, [FAULTS[n][1] for n in names])[0]
            before = self._quiet()
            if FAULTS[name][0](self):
                self.faults[name] += 1
                if self._candidate is not None and self.s.now - self._candidate >= APART:
                    self.certain += 1
                self._candidate = self.s.now if name in OWN - {"init-failure"} and before else None
                self.own += name in OWN
                self.last_fault = self.s.now
                return

    def _quiet(self) -> bool:
        shown = conditions(self.s)
        runs = shown.get("Running", {}).get("status") == "True" and shown["Running"]["reason"].startswith("GroupRuns")
        whole = shown.get("Restarting", {}).get("status") != "True"
        return runs and whole and self.s.now - self.last_fault >= APART and self.s.now >= self.down_until

    def current(self) -> list[Pod]:
        """Return the pods of the current slots that run, as far as the operator knows."""
        slots = self.s.status.get("slots", ())
        names = {f"job-{i}-{slot['attempt']}" for i, slot in enumerate(slots) if slot["state"] == "Running"}
        return [p for p in self.s.running() if p.name in names and not p.deleting]

    def some(self) -> Pod | None:
        """Choose one of the current pods at random."""
        current = self.current()
        return self.random.choice(current) if current else None

    def heal_later(self, seconds: float, heal: Callable[[], None]) -> None:
        """Schedule the repair of a fault."""
        self.s.clock.later(seconds, heal)

    # ---- the end

    async def _end(self) -> None:
        s = self.s
        self.calm = True
        if self._candidate is not None and s.now - self._candidate >= APART:
            self.certain += 1
        s.network.say("calm: nothing more happens, and everything is repaired")
        s.cluster.die_at = ()
        s.cluster.conflicts = 0
        s.cluster.lose_messages = s.cluster.repeat_messages = s.cluster.delay_messages = s.cluster.lose_reports = 0.0
        s.network.operator_cut = False
        s.machines.capacity = 10**6
        self.gap_until = self.down_until = s.now
        for host in s.machines.hosts.values():
            s.machines.heal(host)
        for pod in list(s.machines.pods.values()):
            pod.isolated = False
            if pod.launcher is not None and pod.launcher.stuck and not pod.removed:
                s.force_delete(pod.name)  # otherwise a finished group may wait for it forever
        s.network.changed()
        s.cluster.changed()
        if s.spec.get("runPolicy", {}).get("suspend"):
            s.change_spec({"runPolicy": {**s.spec["runPolicy"], "suspend": False}})
        self.looks = Looks((1, 2), (0.02, 0.2))
        s.training.steps = s.training.made + 4
        began = s.now
        while s.phase not in ("Complete", "Failed"):
            if s.now - began > CALM_SECONDS:
                raise Violation(
                    f"left alone for {CALM_SECONDS:.0f} s, the job is {s.phase}: {s.status}\n{s.inventory()}"
                )
            await self._run(s.now + 2)
        self._check_outcome()
        ended = s.now
        while any(not p.removed and (not p.ended or not p.is_node) for p in s.machines.pods.values()):
            if s.now - ended > 120:
                raise Violation(f"two minutes after the end pods still run: {s.inventory()}")
            await self._run(s.now + 3)
        await self._idempotent()
        self._check_left_over()

    def _check_outcome(self) -> None:
        s = self.s
        restarts = s.status["restarts"]
        shown = conditions(s)
        maximum = s.spec["recovery"]["maxRestarts"]
        if s.phase == "Failed":
            reason = shown["Failed"]["reason"]
            if not (self.fatal or (reason == "RestartBudgetSpent" and restarts["counted"] > maximum)):
                raise Violation(f"the job has failed for no reason: {shown['Failed']}")
        elif restarts["counted"] > maximum:
            raise Violation(f"{restarts['counted']} restarts counted of {maximum}, and yet it continued")
        if restarts["counted"] > self.own:
            raise Violation(f"{restarts['counted']} restarts counted, but the job failed {self.own} times: {restarts}")
        if restarts["counted"] + len(self.replaced) < self.certain and s.phase != "Failed":
            raise Violation(f"{restarts['counted']} restarts counted of {self.certain} certain failures: {restarts}")
        low, high = self.bounds
        if any(not low <= world <= high for world in s.invariants.worlds):
            raise Violation(f"groups of {s.invariants.worlds} nodes; from {low} to {high} were wanted")

    def _check_left_over(self) -> None:
        s = self.s
        kept = s.spec["runPolicy"]["failedPodsKept"]
        failed = Counter(p.index for p in s.nodes() if p.main.exit_code != 0)
        if any(count > kept + 1 for count in failed.values()):
            raise Violation(f"more failed pods are kept than {kept}: {failed}")


def _random_spec(chance: random.Random) -> tuple[Json, tuple[int, int]]:
    nodes = chance.choice((1, 2, 2, 3, 4))
    fast = chance.random() < 0.6
    backoff = chance.choice(({"initialSeconds": 1, "maxSeconds": 8}, {"initialSeconds": 0.5, "maxSeconds": 2}))
    spec: Json = {
        "nodes": nodes,
        "spares": chance.choice((0, 0, 0, 1, 2)),
        "recovery": {
            "maxRestarts": chance.choice((1000, 1000, 1000, 2, 1, 0)),
            "mode": "Fast" if fast else "Standard",
            "nodeLostAfterSeconds": chance.choice((10, 15, 25)),
            "hangAfterSeconds": chance.choice((10, 20)),
            "backoff": backoff,
        },
        "runPolicy": {"failedPodsKept": chance.choice((0, 1, 3))},
        "rendezvous": {"placement": "Dedicated" if fast else chance.choice(("Dedicated", "Dedicated", "Master"))},
    }
    low = nodes
    if chance.random() < 0.4:
        low = chance.randint(1, nodes)
        spec["elastic"] = {"minNodes": low, "maxNodes": nodes + 2}
    return spec, ((low, nodes + 2) if "elastic" in spec else (nodes, nodes))


# ---- one function for each kind of fault; it returns False if the fault is impossible now


def _force_delete(t: Story) -> bool:
    pod = t.some()
    if pod is None:
        return False
    t.s.force_delete(pod.name)
    return True


def _delete(t: Story) -> bool:
    pod = t.some()
    if pod is None:
        return False
    t.s.delete(pod.name)
    return True


def _delete_pair(t: Story) -> bool:
    current = t.current()
    if len(current) < 2:
        return False
    for pod in t.random.sample(current, 2):
        (t.s.force_delete if t.random.random() < 0.5 else t.s.delete)(pod.name)
    return True


def _worker(t: Story) -> bool:
    pod = t.some()
    code, message = t.random.choice(
        ((1, "ValueError: lunch"), (3, "ended with exit code 3"), (-11, "killed by signal SIGSEGV"))
    )
    return pod is not None and t.s.worker_fails(pod.name, message, code)


def _two_workers(t: Story) -> bool:
    hit = [p for p in t.current() if p.launcher and p.launcher.round and t.s.training.runs(p.launcher.round)]
    if len(hit) < 2:
        return False
    for pod in hit[:2]:
        pod.launcher.worker_ends("ValueError: lunch", 1)  # type: ignore[union-attr]
        t.s.network.say(f"FAULT: a worker of {pod.name} fails together with another")
    return True


def _worker_oom(t: Story) -> bool:
    pod = t.some()
    return pod is not None and t.s.worker_fails(
        pod.name, "killed by the kernel: the container's memory limit", -9, oom=True
    )


def _exit(t: Story) -> bool:
    pod = t.some()
    if pod is None or pod.host.cut:
        return False
    code, reason = t.random.choice(((1, "Error"), (137, "OOMKilled"), (134, "Error")))
    t.s.end(pod.name, code, reason)
    return True


def _exit_pair(t: Story) -> bool:
    """Terminate two pods at the same moment. This is one break, and counts once."""
    pods = [p for p in t.current() if not p.host.cut]
    if len(pods) < 2 or not t.s.status.get("progress"):
        return False
    for pod in t.random.sample(pods, 2):
        t.s.end(pod.name, 137, "OOMKilled")
    return True


def _exit_uncounted(t: Story) -> bool:
    pod = t.some()
    if pod is None or pod.host.cut:
        return False
    t.s.end(pod.name, 79)
    return True


def _hang(t: Story) -> bool:
    pod = t.some()
    launcher = pod.launcher if pod is not None else None
    if launcher is None or launcher.round is None or not t.s.training.runs(launcher.round):
        return False
    if "hangAfterSeconds" not in t.s.spec["recovery"]:
        return False
    current = launcher.round
    current.hung = True
    t.s.network.say(f"FAULT: {current} hangs")
    return True


def _stuck(t: Story) -> bool:
    pod = t.some()
    if pod is None or pod.launcher is None or pod.launcher.stuck or not pod.launcher.has_been_ready:
        return False  # a group waits forever for a pod that is stuck before it was ever ready
    t.s.network.say(f"FAULT: the launcher of {pod.name} is stuck")
    pod.launcher.stuck = True
    t.own += 1  # its round may look like a hang later
    t.hung_until = (
        t.s.now + 130
    )  # a coordinator that takes over believes that its round runs until the other members leave it
    return True


def _coordinator(t: Story) -> bool:
    names = [p.name for p in t.s.pods.values() if p.role is Role.COORDINATOR and p.running and not p.deleting]
    if not names:
        return False
    name = t.random.choice(names)
    if t.s.status.get("rendezvous", {}).get("state") == "Planned":
        t.s.invariants.unseen.add(name)
    how = t.random.choice((t.s.force_delete, t.s.delete, t.s.end))
    if how == t.s.end:
        # its own exit code counts as a failure of the job if the group cannot continue without the
        # pod
        t.own += not t.s.fast
        t.s.end(name, 1)
    else:
        how(name)
    return True


def _cut_host(t: Story) -> bool:
    hosts = [p.host for p in t.s.machines.pods.values() if p.running and not p.host.cut]
    if not hosts or sum(h.cut for h in t.s.machines.hosts.values()) >= 2:
        return False
    host = t.random.choice(hosts)
    t.s.cut(host.name, t.random.choice((1.0, 4.0, 9.0, None)))
    if t.random.random() < 0.3:
        t.s.network.say(f"FAULT: host {host.name} is off")
        t.s.machines.lose(host)
    t.heal_later(t.random.choice((1.0, 4.0, 8.0, 20.0, 60.0)), lambda: t.s.machines.heal(host))
    return True


def _kubelet(t: Story) -> bool:
    """Kill a kubelet. Its containers continue to run, and only the API server cannot reach them."""
    hosts = [p.host for p in t.s.machines.pods.values() if p.running and not p.host.silent]
    if not hosts or sum(h.silent for h in t.s.machines.hosts.values()) >= 2:
        return False
    host = t.random.choice(hosts)
    t.s.network.say(f"FAULT: the kubelet of host {host.name} dies")
    t.s.machines.silence(host, t.random.choice((1.0, 4.0, 9.0)))
    t.heal_later(t.random.choice((4.0, 20.0, 60.0, 120.0)), lambda: t.s.machines.heal(host))
    return True


def _agent(t: Story) -> bool:
    """Let a health agent report a node of the job as unhealthy: briefly, for a long time, or
    repeatedly.
    """
    hosts = [p.host for p in t.s.machines.pods.values() if p.running and not p.host.silent and not p.host.ill]
    if not hosts:
        return False
    host, begin = t.random.choice(hosts), 0.0
    for seconds in t.random.choice(((1.0,), (20.0,), (120.0,), (4.0, 4.0, 4.0), (1.0, 1.0, 9.0))):
        t.s.clock.later(begin, lambda: t.s.machines.diagnose(host, True))
        t.s.clock.later(begin + seconds, lambda: t.s.machines.diagnose(host, False))
        begin += seconds + 1
    t.s.network.say(f"FAULT: the health agent of host {host.name} speaks")
    return True


def _delete_host(t: Story) -> bool:
    hosts = [p.host for p in t.s.machines.pods.values() if p.running and not p.host.cut]
    if not hosts or len(t.s.machines.hosts) < 6:
        return False
    host = t.random.choice(hosts)
    t.s.network.say(f"FAULT: host {host.name} is deleted")
    t.s.machines.delete_host(host)
    return True


def _isolate(t: Story) -> bool:
    pods = [p for p in t.s.machines.pods.values() if p.running and not p.isolated]
    if not pods:
        return False
    pod, seconds = t.random.choice(pods), t.random.choice((0.5, 3.0, 7.0, 9.0))
    t.s.network.say(f"FAULT: the network of {pod.name} is broken for {seconds} s")
    t.s.machines.isolate(pod, seconds)
    return True


def _cut_operator(t: Story) -> bool:
    seconds = t.random.choice((2.0, 6.0, 12.0))
    t.s.network.say(f"FAULT: the operator reaches no coordinator for {seconds} s")
    t.s.network.operator_cut = True
    t.lossy_until = max(t.lossy_until, t.s.now + seconds)
    t.heal_later(seconds, lambda: setattr(t.s.network, "operator_cut", False))
    return True


def _kill_operator(t: Story) -> bool:
    t.s.cluster.die_at = {t.s.cluster.points + t.random.randint(1, 12)}
    return True


def _conflicts(t: Story) -> bool:
    t.s.cluster.conflicts = t.random.randint(1, 3)
    return True


def _watch_gap(t: Story) -> bool:
    seconds = t.random.choice((3.0, 10.0, 40.0))
    t.s.network.say(f"FAULT: the watches are silent for {seconds} s")
    t.gap_until = t.s.now + seconds
    t.lossy_until = max(t.lossy_until, t.gap_until + 1)
    return True


def _lossy(t: Story) -> bool:
    seconds = t.random.choice((3.0, 10.0))
    cluster = t.s.cluster
    cluster.lose_messages, cluster.repeat_messages, cluster.delay_messages, cluster.lose_reports = (
        t.random.choice((0.0, 0.3, 0.8)) for _ in range(4)
    )
    t.s.network.say(f"FAULT: for {seconds} s requests to the coordinator are lost, doubled or late")
    t.lossy_until = max(t.lossy_until, t.s.now + seconds)

    def end() -> None:
        cluster.lose_messages = cluster.repeat_messages = cluster.delay_messages = cluster.lose_reports = 0.0

    t.heal_later(seconds, end)
    return True


def _scale(t: Story) -> bool:
    low, high = t.bounds
    change: Json = {"nodes": t.random.randint(low, high), "spares": t.random.randint(0, 2)}
    t.s.change_spec(change)
    return True


def _suspend(t: Story) -> bool:
    policy = t.s.spec["runPolicy"]
    if policy.get("suspend"):
        return False
    t.s.change_spec({"runPolicy": {**policy, "suspend": True}})

    def resume() -> None:
        if t.s.phase not in ("Complete", "Failed"):
            t.s.change_spec({"runPolicy": {**t.s.spec["runPolicy"], "suspend": False}})

    t.heal_later(t.random.choice((1.0, 5.0, 12.0)), resume)
    return True


def _template(t: Story) -> bool:
    t.s.change_spec({"env": [{"name": "LR", "value": str(t.random.random())}]})
    return True


def _patience(t: Story) -> bool:
    if not t.s.training.progress:
        return False
    recovery = {**t.s.spec["recovery"], "hangAfterSeconds": t.random.choice((8, 15, 30))}
    t.s.change_spec({"recovery": recovery})
    return True


def _key(t: Story) -> bool:
    t.s.network.say("FAULT: the operator starts with another key")
    t.s.cluster.platform = Platform(operator_key=str(t.random.random()).encode())
    return True


def _capacity(t: Story) -> bool:
    t.s.network.say("FAULT: the cluster has no room for more pods")
    t.s.machines.capacity = max(1, len(t.current()) - t.random.randint(0, 1))
    t.heal_later(t.random.choice((5.0, 20.0)), lambda: setattr(t.s.machines, "capacity", 10**6))
    return True


def _init_failure(t: Story) -> bool:
    """Make the next launcher fail at its start. By design, this fails the job before its first
    step.
    """
    pod = t.some()
    if pod is None or t.s.training.made < 3 or not t.s.status.get("progress", {}).get("step"):
        return False
    t.s.network.say("FAULT: a launcher that starts now cannot begin")
    t.fatal = True

    def on_pod(started: Pod) -> None:
        if started.launcher is not None:
            started.launcher.init_error = "ModuleNotFoundError: No module named 'lunch'"
            t.s.machines.on_pod = lambda pod: None

    t.s.machines.on_pod = on_pod
    return True


FAULTS: dict[str, tuple[Callable[[Story], bool], int]] = {
    "force-delete": (_force_delete, 3),
    "delete": (_delete, 3),
    "delete-pair": (_delete_pair, 1),
    "worker": (_worker, 5),
    "two-workers": (_two_workers, 2),
    "worker-oom": (_worker_oom, 1),
    "exit": (_exit, 2),
    "exit-uncounted": (_exit_uncounted, 1),
    "exit-pair": (_exit_pair, 1),
    "hang": (_hang, 1),
    "stuck": (_stuck, 1),
    "coordinator": (_coordinator, 3),
    "cut-host": (_cut_host, 3),
    "delete-host": (_delete_host, 1),
    "kubelet": (_kubelet, 6),
    "agent": (_agent, 6),
    "isolate": (_isolate, 3),
    "cut-operator": (_cut_operator, 1),
    "kill-operator": (_kill_operator, 4),
    "conflicts": (_conflicts, 2),
    "watch-gap": (_watch_gap, 1),
    "lossy": (_lossy, 2),
    "scale": (_scale, 3),
    "suspend": (_suspend, 1),
    "template": (_template, 1),
    "patience": (_patience, 1),
    "key": (_key, 1),
    "capacity": (_capacity, 1),
    "init-failure": (_init_failure, 1),
}
OWN = {"worker", "two-workers", "worker-oom", "exit", "exit-pair", "hang", "init-failure"}


class KubeletStory(Story):
    """A story with the usual faults, in which kubelets die as well."""

    left_out = frozenset({"agent"})


class AgentStory(Story):
    """A story with health agents. The operator believes them after 3 s, because stories are shorter
    than the delay in production.
    """

    left_out = frozenset({"kubelet"})

    async def run(self) -> None:
        with mock.patch.object(node_health, "LASTS", timedelta(seconds=3)):
            await super().run()


KINDS: dict[str, type[Story]] = {"": Story, "kubelets": KubeletStory, "agents": AgentStory}
"""The kinds of story, by the options of replay.py that select them."""

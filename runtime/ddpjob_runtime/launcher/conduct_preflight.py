"""The launcher's part of `spec.preflight`, which runs the checks and finds the faulty node.

A new pod checks its own node before it is ready. If the scope is Group, the links are checked
before a new pod's first round. This check has several stages, but the later ones run only if the
first one fails:

1. `group`: all nodes do an all-reduce together. If it passes, training begins.
2. `alone`: each node does an all-reduce among its own ranks, if it has several.
3. `pairs0` to `pairs2`: neighbours in a ring do an all-reduce, so that each link is tried once.

A node is at fault if an all-reduce among its own ranks fails, or if the links to both of its
neighbours fail. If only one of its links fails, the fault may be at either end. In that case, one
of the two nodes ends with an ordinary failure, and no culprit is named.

Example: the all-reduce of 4 nodes fails. Pairs (0, 1) and (2, 3) are tried, then (1, 2) and (3, 0).
The pairs (0, 1) and (1, 2) fail, so the node of rank 1 is the culprit and ends as unfit.

The nodes write their results into the round's store. The node with rank 0 judges the results, and
all nodes obey its verdict.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ddpjob_pod.job_environment import JobEnvironment

from ddpjob_runtime import protocol
from ddpjob_runtime.launcher.check_entrypoint import InitFailure
from ddpjob_runtime.launcher.shutdown import log
from ddpjob_runtime.store import serve

PACKAGE = Path(__file__).resolve().parent.parent
STAGES = 5
"""Maximum number of stages in a link check: one for the whole group, one in which each node is
alone, and three for pairs of nodes. Each stage has its own time limit.
"""
MARGIN_SECONDS = 15.0
"""Seconds to allow for one exchange over the store. In addition to its check, a stage needs four
such exchanges: one for the address where its ranks meet, one for the results, and two for the
verdict.
"""
_POLL_SECONDS = 0.05
_MAX_OUTPUT = 64 * 1024

Cancelled = Callable[[], bool]
Group = tuple[int, ...]
"""The group ranks of the nodes that do an all-reduce together."""


class Abandoned(Exception):
    """A check was cancelled because its result is no longer needed."""


@dataclass(frozen=True)
class PreflightSettings:
    """The settings in DDPJOB_PREFLIGHT.

    `least` is the minimum rate of an all-reduce in 10^6 bytes per second; 0 if any rate will do.
    """

    group: bool
    seconds: float
    least: float
    gpus: int
    resource: str
    backend: str
    folder: str

    @classmethod
    def read(cls) -> PreflightSettings | None:
        """Read the settings; return None if the job has no preflight.

        Raises InitFailure if the settings are invalid.
        """
        text = JobEnvironment.read().preflight
        if not text:
            return None
        try:
            known = json.loads(text)
            return cls(
                bool(known["group"]), float(known["seconds"]), float(known["least"]), int(known["gpus"]),
                str(known["resource"]), str(known["backend"]), str(known["folder"]),
            )  # fmt: skip
        except (ValueError, KeyError, TypeError) as error:
            raise InitFailure(f"DDPJOB_PREFLIGHT cannot be read ({error!r}): {text[:200]!r}") from None


class HardwareCheck:
    """A process that runs one check in `hardware_check`."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        command = [sys.executable, str(PACKAGE), "check", json.dumps(settings)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._output, self._ended = b"", False

    def wait(self, until: float, cancelled: Cancelled) -> dict[str, Any]:
        """Wait for the process, and return the result of its check.

        If there is no result by the monotonic time `until`, the problem in the returned value names
        the step that hangs. Raises Abandoned if the check is cancelled.
        """
        assert self._process.stdout is not None
        try:
            while not self._ended and time.monotonic() < until:
                if cancelled():
                    raise Abandoned
                if select.select([self._process.stdout], [], [], _POLL_SECONDS)[0]:
                    part = os.read(self._process.stdout.fileno(), _MAX_OUTPUT)
                    self._output = (self._output + part)[-_MAX_OUTPUT:]
                    self._ended = not part
        finally:
            self.kill()
        return self._result()

    def _result(self) -> dict[str, Any]:
        step = "start"
        for line in self._output.splitlines():
            # The image's own code may print other lines.
            with contextlib.suppress(ValueError, TypeError, KeyError):
                said = json.loads(line)
                if "problem" in said:
                    return dict(said)
                step = str(said["step"])
        if not self._ended:
            return {"problem": f"timed out in this step: {step}"}
        return {"problem": f"the check ended with exit code {self._process.returncode} in this step: {step}"}

    def kill(self) -> None:
        """Kill the process, even if it hangs."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        # A driver may block the process, so do not wait long for its end.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)


class NodePreflight:
    """The checks that this node must pass before it trains."""

    def __init__(self, settings: PreflightSettings, procs: int) -> None:
        self.settings, self._procs = settings, procs
        self._checks: list[HardwareCheck] = []
        self.passed_group = False

    @property
    def wanted_seconds(self) -> int:
        """Maximum number of seconds by which a link check can delay this node's next round.

        The number is 0 if no link check is needed.
        """
        if not self.settings.group or self.passed_group:
            return 0
        return int(STAGES * (self.settings.seconds + 4 * MARGIN_SECONDS))

    def begin(self) -> None:
        """Start this node's check, and return immediately."""
        known = self.settings
        what = {"what": "node", "folder": known.folder, "pod": JobEnvironment.read().pod}
        self._checks = [HardwareCheck({**what, "gpus": known.gpus, "resource": known.resource})]
        self._until = time.monotonic() + known.seconds

    def node_problem(self, cancelled: Cancelled) -> str:
        """Wait for this node's check, and return its problem; empty if the node passed.

        Raises Abandoned if the check is cancelled.
        """
        began = self._until - self.settings.seconds
        problem = str(self._checks[0].wait(self._until, cancelled)["problem"])
        took = time.monotonic() - began
        log(f"preflight: {problem}" if problem else f"preflight: this node passed ({took:.1f} s)")
        return problem

    def kill(self) -> None:
        """Kill all checks that are still running."""
        for check in self._checks:
            check.kill()

    def check_links(self, store: Any, rank: int, world: int, host: str, cancelled: Cancelled) -> LinkVerdict:
        """Check the links between a round's nodes, and return the verdict.

        The verdict is the same on all nodes of the round. `host` is this node's address.

        Raises Abandoned if the check is cancelled, and any error from torch's store.
        """
        results: dict[str, dict[int, NodeResult]] = {}
        for stage, groups in stages(world, self._procs):
            until = time.monotonic() + self.settings.seconds + 2 * MARGIN_SECONDS
            own = next((group for group in groups if rank in group), ())
            result = self._join(store, stage, own, rank, host, cancelled) if own else NodeResult()
            store.set(f"{stage}/{rank}", json.dumps(asdict(result)))
            if rank == 0:
                among = sorted(member for group in groups for member in group)
                results[stage] = {other: _collect(store, stage, other, until, cancelled) for other in among}
                verdict = judge(world, self._procs, results, self.settings.least)
                store.set(f"{stage}/verdict", json.dumps(None if verdict is None else verdict.write()))
            text = _await(store, f"{stage}/verdict", until + 2 * MARGIN_SECONDS, cancelled)
            known = json.loads(text) if text else LinkVerdict(failed="rank 0 reported no verdict", ends=0).write()
            if known is not None:
                verdict = LinkVerdict.read(known)
                self.passed_group = not verdict.failed
                return verdict
        raise AssertionError("the last stage returned no verdict")

    def _join(self, store: Any, stage: str, group: Group, rank: int, host: str, cancelled: Cancelled) -> NodeResult:
        """Do this node's part of one all-reduce among the nodes in `group`."""
        known, place, key = self.settings, group.index(rank), f"{stage}/{group[0]}/store"
        pod = JobEnvironment.read().pod
        on = os.environ.get("NODE_NAME", "")
        server = None
        if place == 0:
            server = serve(host, seconds=known.seconds)
            store.set(key, json.dumps([host, server.port]))
        address = _await(store, key, time.monotonic() + MARGIN_SECONDS, cancelled)
        if not address:
            return NodeResult(pod, on, "the first node in its test group did not respond")
        where, port = json.loads(address)
        common = {"what": "links", "world": len(group) * self._procs, "host": where, "port": port}
        common |= {"backend": known.backend, "gpus": known.gpus, "seconds": known.seconds}
        self._checks = [
            HardwareCheck({**common, "rank": place * self._procs + local, "local": local})
            for local in range(self._procs)
        ]
        until = time.monotonic() + known.seconds
        try:
            found = [check.wait(until, cancelled) for check in self._checks]
        finally:
            self.kill()
        if server is not None and len(group) > 1:
            self._linger(store, stage, group, cancelled)
        problem = next((f"local rank {i}: {f['problem']}" for i, f in enumerate(found) if f["problem"]), "")
        rates = [float(f["rate"]) for f in found if f.get("rate")]
        return NodeResult(pod, on, problem, min(rates, default=0.0), str(found[0].get("transport", "")))

    def _linger(self, store: Any, stage: str, group: Group, cancelled: Cancelled) -> None:
        """Keep the group's store open for as long as the other nodes in the group need it.

        If the store disappeared, these nodes would report a broken link.
        """
        until = time.monotonic() + MARGIN_SECONDS
        while time.monotonic() < until and not store.check([f"{stage}/{other}" for other in group[1:]]):
            if cancelled():
                raise Abandoned
            time.sleep(_POLL_SECONDS)


def _collect(store: Any, stage: str, rank: int, until: float, cancelled: Cancelled) -> NodeResult:
    text = _await(store, f"{stage}/{rank}", until, cancelled)
    return NodeResult(**json.loads(text)) if text else NodeResult(f"of rank {rank}", problem="it reported no result")


def _await(store: Any, key: str, until: float, cancelled: Cancelled) -> str:
    """Wait until the store has a key, and return its value.

    If there is still no value at the monotonic time `until`, return an empty string. Raises
    Abandoned if the check is cancelled.
    """
    pause = 0.01
    while not store.check([key]):
        if cancelled():
            raise Abandoned
        if time.monotonic() > until:
            return ""
        time.sleep(pause)
        pause = min(2 * pause, 0.25)
    return bytes(store.get(key)).decode()


# --- who is at fault; pure


@dataclass(frozen=True)
class NodeResult:
    """The result of one node in one stage.

    `rate` is in 10^6 bytes per second; 0 if no rate was measured.
    """

    pod: str = ""
    node: str = ""
    problem: str = ""
    rate: float = 0.0
    transport: str = ""

    @property
    def name(self) -> str:
        return f"pod {self.pod}" + (f" on Kubernetes node {self.node}" if self.node else "")

    def fault(self, least: float) -> str:
        """Return the reason why this result is not good enough; empty if it is."""
        if self.problem:
            return self.problem
        slow = self.rate and self.rate < least
        return f"{self.rate:.0f} MB/s, less than the required {least:.0f} MB/s" if slow else ""


@dataclass(frozen=True)
class LinkVerdict:
    """The verdict of a link check.

    `failed` is the reason why the check failed. If it is empty, all nodes can train, and `passed`
    describes the group. `culprits` contains the nodes that must not train, as a dict from group
    rank to reason. If no culprit is known, `ends` is the group rank of the node that ends with an
    ordinary failure.
    """

    passed: str = ""
    failed: str = ""
    culprits: dict[int, str] = field(default_factory=dict)
    ends: int | None = None

    def write(self) -> dict[str, Any]:
        """Return the verdict as a JSON object. Its `culprits` have strings as keys."""
        return {**asdict(self), "culprits": {str(rank): why for rank, why in self.culprits.items()}}

    @classmethod
    def read(cls, body: dict[str, Any]) -> LinkVerdict:
        """Parse a verdict written by `write`."""
        return cls(**{**body, "culprits": {int(rank): why for rank, why in body["culprits"].items()}})


def stages(world: int, procs: int) -> Iterator[tuple[str, list[Group]]]:
    """Yield a pair (name, groups of nodes) for each stage of a link check, in order.

    Within a stage, a node belongs to at most one group.
    """
    yield "group", [tuple(range(world))]
    if procs > 1 and world > 1:
        yield "alone", [(rank,) for rank in range(world)]
    if world > 2:
        last: list[Group] = [(world - 1, 0)]
        odd: list[Group] = [(rank, rank + 1) for rank in range(1, world - 1, 2)]
        yield "pairs0", [(rank, rank + 1) for rank in range(0, world - 1, 2)]
        yield "pairs1", odd + (last if world % 2 == 0 else [])
        if world % 2:
            yield "pairs2", last


def judge(world: int, procs: int, results: Mapping[str, Mapping[int, NodeResult]], least: float) -> LinkVerdict | None:
    """Return the verdict after the stages in `results`; None if another stage is needed.

    A node is a culprit if the all-reduce among its own ranks fails, or if its links to both
    neighbours in the ring fail while other links pass.

    If both links of several consecutive nodes fail, name the fewest of these nodes that explain the
    failures. The next check tests the remaining nodes again.
    """
    group = results["group"]
    faults = {rank: fault for rank, result in group.items() if (fault := result.fault(least))}
    if not faults:
        return LinkVerdict(passed=_summary(world, procs, group))
    if any(stage not in results for stage, _ in stages(world, procs)):
        return None
    first = min(faults)
    alone = results.get("alone", group if world == 1 else {})
    culprits = {
        rank: f"an all-reduce fails even within {result.name}: {fault}"
        for rank, result in alone.items()
        if (fault := result.fault(least))
    }
    broken: dict[Group, str] = {}
    for stage, groups in stages(world, procs):
        for pair in groups if stage.startswith("pairs") else ():
            found = [results[stage][rank].fault(least) for rank in pair]
            if any(found) and culprits.keys().isdisjoint(pair):
                broken[pair] = next(fault for fault in found if fault)
    if len(broken) < world:
        culprits |= _middles(world, group, broken)
    left = {pair: why for pair, why in broken.items() if culprits.keys().isdisjoint(pair)}
    what = f"an all-reduce over {world} nodes fails in {group[first].name}: {faults[first]}"
    if culprits:
        return LinkVerdict(failed="; ".join(culprits[rank] for rank in sorted(culprits)), culprits=culprits)
    if left:
        (a, b), why = next(iter(left.items()))
        more = f" (and {len(left) - 1} more links)" if len(left) > 1 else ""
        link = f"the link between {group[a].name} and {group[b].name}{more} fails: {why}"
        return LinkVerdict(failed=f"{link}; it is unknown which of the two is at fault", ends=max(a, b))
    if world > 2 and not any(result.problem for result in group.values()):
        return LinkVerdict(
            passed=f"{_summary(world, procs, group)}, but each pair of neighbours reaches {least:.0f} MB/s"
        )
    why = "; it is unknown which of the two is at fault" if world == 2 else ", although each pair of neighbours passes"
    return LinkVerdict(failed=what + why, ends=world - 1)


def _middles(world: int, group: Mapping[int, NodeResult], broken: Mapping[Group, str]) -> dict[int, str]:
    """Return the culprits among the nodes with two broken links, with a reason for each.

    In a sequence of such nodes, every second node is a culprit, beginning with the first.
    """
    culprits: dict[int, str] = {}
    start = next(rank for rank in range(world) if not _broken(broken, world, rank - 1))
    for step in range(world):
        rank = (start + step) % world
        before, after = _broken(broken, world, rank - 1), _broken(broken, world, rank)
        if before and after and (rank - 1) % world not in culprits:
            left, right = group[(rank - 1) % world], group[(rank + 1) % world]
            neighbours = f"{left.name} and {right.name}"
            culprits[rank] = f"the links from {group[rank].name} to {neighbours} fail: {before}"
    return culprits


def _broken(broken: Mapping[Group, str], world: int, rank: int) -> str:
    """Return the reason why the link from a node to the next one is broken; empty if the link
    works.
    """
    a, b = rank % world, (rank + 1) % world
    return broken.get((a, b), "")


def _summary(world: int, procs: int, group: Mapping[int, NodeResult]) -> str:
    rates = [result.rate for result in group.values() if result.rate]
    speed = f", {min(rates):.0f} MB/s" if rates else ""
    transports = sorted({result.transport for result in group.values()})
    how = protocol.clip("; ".join(transports), 500)
    return f"an all-reduce of {world} x {procs} ranks is correct{speed}, via {how}"

"""How a night of jobs is judged: which jobs would fit, how long each has waited, and the ledger of
the simulated training.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.night.schedule import Job, draw_faults, draw_jobs
from benchmarks.night.simulated import Clock, Network, Pace
from benchmarks.night.training import PlayedTraining, judge
from benchmarks.night.waits import Lack, Need, Waits, Whose, fitting, free_gpus, needs

JOB = Job("job", 0.0, 2, 4, 10, 2, "normal", "Fast", 2, 0)
Json = dict[str, Any]


def need(name: str, pods: int, gpus: int, priority: int = 0, since: str = "2026-01-01T00:00:00Z", **more: Any) -> Need:
    return Need(name, Lack.GANG, pods, gpus, priority, since, Whose.SCHEDULER, **more)


def pod(name: str, node: str = "", *, phase: str = "Pending", generation: int = 0, role: str = "node") -> Json:
    labels = {"ddpjob.io/job": "job", "ddpjob.io/role": role, "ddpjob.io/generation": str(generation)}
    container = {"resources": {"requests": {"nvidia.com/gpu": "4"} if role == "node" else {}}}
    spec = {"containers": [container], **({"nodeName": node} if node else {})}
    meta = {"name": name, "labels": labels, "creationTimestamp": "2026-01-01T00:00:00Z"}
    return {"metadata": meta, "spec": spec, "status": {"phase": phase}}


def node(name: str, *, ready: str = "True", **spec: Any) -> Json:
    status = {"allocatable": {"nvidia.com/gpu": "8"}, "conditions": [{"type": "Ready", "status": ready}]}
    return {"metadata": {"name": name}, "spec": spec, "status": status}


def test_resources_are_free_if_no_pod_holds_them_on_a_ready_node() -> None:
    tainted = node("c", taints=[{"key": "any", "effect": "NoSchedule"}])
    nodes = [node("a"), node("b", ready="Unknown"), tainted, node("d", unschedulable=True)]
    ending = pod("ending", "a", phase="Running")
    ending["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert free_gpus(nodes, [ending, pod("ended", "a", phase="Failed"), pod("waits")]) == {"a": 4}


def test_a_gang_fits_only_as_a_whole_and_with_each_pod_on_a_separate_node() -> None:
    assert fitting({"a": 8, "b": 4}, [need("two", 2, 4)])
    assert not fitting({"a": 8, "b": 3}, [need("two", 2, 4)]), "both pods must not be on one node"
    assert not fitting({"a": 8, "b": 4}, [need("two", 1, 4, apart=frozenset({"a", "b"}))])


def test_pods_are_placed_in_order_and_room_is_reserved_for_a_preempting_pod() -> None:
    free = {"a": 4}
    one, other = need("one", 1, 4, since="2026-01-01T00:00:01Z"), need("other", 1, 4)
    assert fitting(free, [one, other]) == [other], "the older one"
    assert fitting(free, [replace(one, priority=1), other]) == [replace(one, priority=1)]
    preempting = need("big", 1, 8, priority=1, nominated=("a",))
    assert fitting(free, [preempting, other]) == []


def test_the_number_of_missing_nodes_follows_from_a_jobs_pods() -> None:
    gang = {"rendezvous": {"generation": 1}, "slots": [{}, {}], "gang": {"nodes": 2}}
    job = {"metadata": {"name": "job", "creationTimestamp": "2026-01-01T00:00:00Z"}, "status": gang}
    old, coordinator = pod("old", "a", phase="Running"), pod("c", role="coordinator", generation=1)
    first, second = pod("first", generation=1), pod("second", generation=1)

    def lacks(*pods: Json, of: Job = JOB) -> list[tuple[Lack, int, Whose, set[str]]]:
        return [(n.lack, n.pods, n.whose, set(n.apart)) for n in needs(of, job, pods, 0)]

    assert lacks(old) == [(Lack.GANG, 2, Whose.OPERATOR, {"a"})]
    assert lacks(old, coordinator, first, second) == [(Lack.GANG, 2, Whose.SCHEDULER, {"a"})]
    gang["gang"] = {"nodes": 2, "placed": True}
    first["spec"]["nodeName"] = "b"
    assert lacks(first, second) == [(Lack.NODE, 1, Whose.SCHEDULER, {"b"})]
    assert lacks(first, of=replace(JOB, minimum=1)) == [(Lack.MORE, 1, Whose.OPERATOR, {"b"})]
    second["spec"]["nodeName"] = "c"
    assert lacks(first, second) == []
    assert lacks(first, second, of=replace(JOB, spares=1)) == [(Lack.MORE, 1, Whose.OPERATOR, {"b", "c"})]
    job["status"] = {"phase": "Complete"}
    assert lacks() == []


def test_a_wait_is_the_time_for_which_a_job_would_fit_without_interruption() -> None:
    waits, one = Waits(), need("one", 2, 4)
    fits = [[one], [one], [replace(one, whose=Whose.OPERATOR)], [], [one], [one], []]
    longest = [waits.look(float(moment), fit) for moment, fit in enumerate(fits)]
    assert longest == [0, 1, 2, 0, 0, 1, 0]
    assert [(w.seconds, w.of[Whose.OPERATOR], w.gpu_seconds) for w in waits.ended] == [(2, 1, 16), (1, 0, 8)]


class Member:
    """A stand-in for a launcher with the attributes that a training run uses."""

    def __init__(self, rank: int, name: str) -> None:
        host = type("Host", (), {"cut": False})()
        self.pod = type("Pod", (), {"name": name, "host": host, "isolated": False, "deaf": False})()
        self.place, self.generation, self.workers, self.ends = {"rank": rank}, 0, "meeting", list[int]()
        self.round: Any = None

    def met(self) -> None:
        self.workers = "running"

    def worker_ends(self, message: str, code: int = 1) -> None:
        self.ends.append(code)

    def finished(self) -> None:
        self.workers = "finished"


def play(training: PlayedTraining, number: int, world: int, seconds: float) -> tuple[Any, list[Member]]:
    """Play a round of `world` members for `seconds`."""
    members = [Member(rank, f"job-{rank}-{number}") for rank in range(world)]
    table = [{"rank": 0, "pod": members[0].pod.name}]
    for member in members:
        go = {"round": number, "rank": member.place["rank"], "world": world, "members": table}
        member.round = training.meet(member, go)  # type: ignore[arg-type]
    for member in members:
        training.started(member, member.round)  # type: ignore[arg-type]
    _pass(training, seconds)
    return members[0].round, members


def _pass(training: PlayedTraining, seconds: float) -> None:
    clock = training.network.clock
    until = clock.now + seconds
    while clock.step(until):
        pass


@pytest.mark.parametrize("forgets", [False, True])
def test_a_simulated_run_is_exact_unless_it_ignores_its_checkpoints(tmp_path: Path, forgets: bool) -> None:
    clock = Clock()
    training = PlayedTraining(Network(clock, draw_chance(), Pace()), JOB, "uid", tmp_path / "job", forgets=forgets)
    training._report = lambda first: None  # type: ignore[method-assign]
    current, members = play(training, 1, 2, 13.5)
    training.left(members[1], current, "died")  # type: ignore[arg-type]
    current, members = play(training, 2, 1, 10.5)
    assert training.made == (5 if forgets else 15), "with half of the nodes, a step takes twice as long"
    training.left(members[0], current, "died")  # type: ignore[arg-type]
    _, members = play(training, 3, 2, 30)
    assert {member.workers for member in members} == {"finished"}
    samples, problem = judge(training)
    assert ("it repeated too many steps" in problem) if forgets else (samples, problem) == (2 * JOB.samples, "")


def test_a_superseded_group_is_fenced_and_writes_no_checkpoint(tmp_path: Path) -> None:
    training = PlayedTraining(Network(Clock(), draw_chance(), Pace()), JOB, "uid", tmp_path / "job")
    training._report = lambda first: None  # type: ignore[method-assign]
    _, old = play(training, 1, 2, 5)
    play(training, 2, 2, 6)
    assert old[0].ends == [79] and training.fenced == 1
    assert not (tmp_path / "job" / "checkpoint.json").exists()
    _pass(training, 5)
    assert json.loads((tmp_path / "job" / "checkpoint.json").read_text())["step"] == 10


def test_a_night_is_determined_by_its_seed() -> None:
    assert draw_jobs(1, 50, 6) == draw_jobs(1, 50, 6) != draw_jobs(2, 50, 6)
    jobs, faults = draw_jobs(1, 50, 6), draw_faults(1, 18)
    assert {job.nodes for job in jobs} >= {1, 2, 8} and all(job.nodes + job.spares <= 8 for job in jobs)
    assert any(job.minimum < job.nodes for job in jobs) and any(job.spares for job in jobs)
    away = [(fault.at, fault.at + fault.seconds) for fault in faults if fault.seconds]
    assert all(before[1] < after[0] for before, after in pairwise(away)), "one node at a time"


def draw_chance() -> random.Random:

    return random.Random(0)

"""When a round without steps is checked, reported and ended. Ranks and time are simulated."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

import pytest
from coordinator_world import World
from ddpjob_bucket.stored import _REQUEST_SECONDS
from ddpjob_runtime.coordinator import standstill
from ddpjob_runtime.protocol import MAX_TRACEBACK, RANK_ENDED, Hangs, RankLook, WaitKind

Played = Callable[[float], "dict[str, Any]"]
"""A function that returns what a check of the rank finds, given the seconds since the last step."""


def stack(place: str, file: str = "/app/train.py") -> str:
    outer = '  File "/app/train.py", line 99 in main\n'
    return f'Stack (most recent call first):\n  File "{file}", line 12 in {place}\n{outer}'


C10D = "/venv/torch/distributed/distributed_c10d.py"
WAITS = {"text": stack("all_reduce", C10D)}
BACKWARD = {"text": stack("_engine_run_backward", "/venv/torch/autograd/graph.py")}
LOADER = {"text": stack("_try_get_data", "/venv/torch/utils/data/dataloader.py")}
LOCK = {"text": stack("acquire", "/usr/lib/python3.12/threading.py")}
NO_STACK = {"text": "(this rank has written no stack)"}
WORKS = {"text": stack("evaluate"), "cpu": 3.0}
SPINS = {"gpu": True, "cpu": 5.0}


class Group:
    """A running round of `ranks` nodes. `plays` has one entry per node: the result of a check of
    its rank at a given time.
    """

    def __init__(self, *plays: Played | dict[str, Any], hangs: Hangs = Hangs.END, steps: int = 40, gap: float = 0.5):
        self.world = World(len(plays), hangs=hangs)
        self.members = self.world.form(len(plays))
        self.plays: list[Any] = list(plays)
        self.silent: set[int] = set()
        self.looks: list[float] = []
        self._read, self.since = 0, self.world.now
        self._last: dict[int, float | None] = dict.fromkeys(range(len(plays)), None)
        for step in range(steps):
            self.pass_time(gap)
            self.report(step=step)

    def report(self, **fields: Any) -> None:
        self.world.coordinator.report_progress(fields)
        self.since = self.world.now
        self._last = dict.fromkeys(range(len(self.plays)), None)

    def pass_time(self, seconds: float) -> None:
        until = self.world.now + seconds
        while self.world.now < until:
            self.world.pass_time(min(0.25, until - self.world.now))
            self._answer()

    def _answer(self) -> None:
        lines = self.world.heard[self.members[0].pod]
        asked = [fields for verb, fields in lines[self._read :] if verb == "look"]
        self._read = len(lines)
        for fields in asked:
            self.looks.append(self.world.now - self.since)
            for rank, member in enumerate(self.members):
                if rank not in self.silent:
                    self.world.coordinator.looked(member, fields["round"], [self._look(rank)])

    def _look(self, rank: int) -> RankLook:
        now, play = self.world.now - self.since, self.plays[rank]
        fields = {"text": "", "cpu": 0.0, "bytes": 0, **(play(now) if callable(play) else play)}
        last, self._last[rank] = self._last[rank], now
        digest = hashlib.sha256(fields["text"].encode()).hexdigest()
        return RankLook(rank=rank, digest=digest, seconds=0.0 if last is None else now - last, **fields)

    def ended_after(self, limit: float = 400.0) -> float | None:
        """Return the seconds from the last step to the end of the round, or None if it is still
        running at the limit.
        """
        while self.world.now - self.since < limit:
            self.pass_time(0.5)
            if self.world.report()["state"] == "Restarting":
                return self.world.now - self.since
        return None

    @property
    def message(self) -> str:
        [incident] = self.world.report()["incidents"]
        assert incident["kind"] == "Hang"
        return str(incident["message"])


def waits(kind: str, call: str = "") -> dict[str, Any]:
    return {"wait": WaitKind(kind), "call": call}


@pytest.mark.parametrize(
    ("plays", "seconds", "named"),
    {
        "a loader whose process is deadlocked": ([WAITS, LOADER], 25, 1),
        "a lock that nobody releases": ([LOCK, WAITS, WAITS], 25, 0),
        "a rank in a different collective": ([WAITS, {"text": stack("barrier", C10D)}], 25, None),
        "all ranks in the same collective": ([WAITS, WAITS], 25, None),
        "all ranks in a backward pass": ([BACKWARD, BACKWARD, BACKWARD], 25, None),
        "every rank in the same lock": ([LOCK, LOCK], 25, None),
        "one rank in a lock, others in a backward pass": ([BACKWARD, LOCK, BACKWARD], 25, 1),
        "the lock of Python held in C": ([WAITS, {"text": stack("call_into_c")}], 25, 1),
        "a rank that has ended": ([WAITS, {"text": RANK_ENDED}], 25, 1),
        "a rank alone": ([LOCK], 25, None),
        "a rank whose threads wake up": ([WAITS, {**LOCK, "cpu": 0.02, "bytes": 900}], 25, 1),
        "a rank that writes no stack and does nothing": ([WAITS, NO_STACK], 25, 1),
        "a dead file server": ([WAITS, {**LOADER, **waits("storage", "fsync")}], 135, 1),
        "a server that never answers": ([WAITS, {"text": stack("readinto", "/usr/lib/python3.12/socket.py")}], 135, 1),
        "a server that never answers a native client": (
            [WAITS, {**LOADER, **waits("server", "10.0.0.7 port 443")}],
            135,
            1,
        ),
        "a driver that never answers": ([WAITS, {**NO_STACK, **waits("storage")}], 135, 1),
        "a stopped process": ([WAITS, {**NO_STACK, **waits("stopped")}], 75, 1),
        "a stopped loader": ([WAITS, {**LOADER, **waits("stopped")}], 75, 1),
        "a file that nobody writes": ([WAITS, {"text": stack("poll"), **waits("asleep")}], 135, 1),
        "a rank in a lock while the others spin in NCCL": ([{**WAITS, **SPINS}, LOCK], 25, 1),
        "all ranks spin in NCCL": ([{**WAITS, **SPINS}, {**WAITS, **SPINS}], 25, None),
        "a rank in a lock while the others spin in item()": ([{"text": stack("item"), **SPINS}, LOCK], 45, 1),
        "two of four ranks in a lock": ([WAITS, LOCK, WAITS, LOCK], 25, None),
        "a rank in a lock, another in a wait that is measured": (
            [{"text": stack("counted", "/ddpjob/ddpjob_pod/own_work.py"), **SPINS}, LOCK],
            25,
            1,
        ),
    }.values(),
)
def test_deliberate_hangs_are_reported_with_their_rank_and_ended(
    plays: list[Any], seconds: float, named: int | None
) -> None:
    group = Group(*plays)
    assert group.ended_after() == pytest.approx(seconds, abs=1.5)
    [incident] = group.world.report()["incidents"]
    assert incident["kind"] == "Hang" and incident["pod"] == (None if named is None else f"job-{named}-0")
    assert named is None or group.message.partition(": ")[2].startswith(f"rank {named} ")
    assert ("the other ranks are waiting for it" in group.message) is (named is not None or len(plays) == 4)


@pytest.mark.parametrize("file", ["python3.12/socket.py", "python3.12/ssl.py", "ddpjob_bucket/stored.py"])
def test_a_slow_response_of_a_server_does_not_end_the_round(file: str) -> None:
    """For example, an object store that completes a large upload before it answers, or that stops
    in the middle of an object until obstore's time limit ends the request.
    """
    waiting = {"text": stack("read", f"/usr/lib/{file}")}
    assert Group(WAITS, between(0, 100, waiting, WORKS)).ended_after(290) is None


def test_a_request_to_a_bucket_fails_before_the_rank_counts_as_hung() -> None:
    assert standstill.PATIENCE[WaitKind.SERVER] > _REQUEST_SECONDS


def between(start: float, end: float, inside: dict[str, Any], outside: dict[str, Any]) -> Played:
    return lambda now: inside if start <= now < end else outside


def moving(now: float) -> dict[str, Any]:
    return {"text": stack(f"layer_{round(now)}")}


@pytest.mark.parametrize(
    "plays",
    {
        "an evaluation on one rank": [WORKS, WAITS],
        "an evaluation on a GPU whose stack changes": [lambda now: {**moving(now), **SPINS}, {**WAITS, **SPINS}],
        "an evaluation on a GPU at one place": [{"text": stack("item"), **SPINS}, {**WAITS, **SPINS}],
        "an evaluation on all GPUs at one place": [{"text": stack("item"), **SPINS}] * 2,
        "a checkpoint to a slow disk": [{**LOCK, "bytes": 200_000, **waits("storage", "write")}, WAITS],
        "a slow download": [{"text": stack("recv"), "bytes": 40_000}, WAITS],
        "a loader that starts processes": [{**LOADER, "forks": 1}, WAITS],
        "a large sum over a slow network": [{**WAITS, "bytes": 10**8}, WAITS],
        "a sum in one's own backward pass": [{**BACKWARD, "cpu": 4.0}, LOCK],
        "a rank in a debugger": [{"text": stack("cmdloop", "/usr/lib/python3.12/pdb.py")}, WAITS],
        "ranks in one collective after another": [lambda now: {"text": stack(f"sum_{now}", C10D)}, WAITS],
    }.values(),
)
def test_a_group_is_not_ended_while_any_rank_shows_activity(plays: list[Any]) -> None:
    group = Group(*plays)
    assert group.ended_after(290) is None and group.world.report()["overdue"] is None
    assert len(group.looks) <= 12, "checks of working ranks become rarer"


@pytest.mark.parametrize("seconds", [2, 5, 12])
@pytest.mark.parametrize("begins", [0, 8, 14.9, 16, 19.9, 24])
def test_a_short_pause_of_a_process_does_not_end_the_round(begins: float, seconds: float) -> None:
    """The process is stopped for a moment during a long but legitimate gap between steps."""
    stopped = {**NO_STACK, **waits("stopped")}
    group = Group(between(begins, begins + seconds, stopped, WORKS), WAITS)
    assert group.ended_after(40) is None


def test_ranks_that_are_stopped_by_a_signal_are_reported_and_not_ended() -> None:
    group = Group(between(0, 40, {**NO_STACK, **waits("stopped")}, WORKS), WAITS)
    group.pass_time(21)
    assert "rank 0 in no Python frame (one of its processes is stopped" in group.world.report()["overdue"]["where"]
    group.pass_time(40)
    assert group.world.report()["overdue"] is None and group.world.report()["state"] == "Running"


def test_a_hang_in_the_middle_of_an_evaluation_is_found() -> None:
    group = Group(lambda now: WORKS if now < 70 else LOCK, WAITS)
    ended = group.ended_after()
    assert ended is not None and 75 < ended <= 70 + 30 + 30 + 12
    assert ": rank 0 in acquire (" in group.message


def test_with_hangs_set_to_report_a_hang_is_shown_immediately_and_never_ended() -> None:
    group = Group(WAITS, LOCK, hangs=Hangs.REPORT)
    group.pass_time(19.5)
    assert group.world.report()["overdue"] is None
    group.pass_time(2)
    assert group.world.report()["overdue"]["where"].startswith(
        "rank 1 in acquire (/usr/lib/python3.12/threading.py:12)"
    )
    assert group.ended_after(3000) is None


def test_a_hung_round_is_ended_once_hangs_is_set_to_end() -> None:
    group = Group(WAITS, LOCK, hangs=Hangs.REPORT)
    group.pass_time(60)
    group.world.coordinator.set_patience(None, 1, 60, Hangs.END)
    assert group.world.report()["hangs"] == "End" and group.ended_after(120) is not None


def test_the_usual_duration_is_measured_per_activity() -> None:
    group = Group(WAITS, LOCK)
    for _ in range(20):
        group.report(activity="evaluating")
        group.pass_time(8)
        group.report(activity=None)
        group.pass_time(0.5)
        group.report(step=1000)
    group.report(activity="evaluating")
    assert group.ended_after() == pytest.approx(90, abs=2), "10 x 8 s, then two checks"


def test_a_hang_is_found_later_while_the_usual_duration_is_unknown() -> None:
    assert Group(WAITS, LOCK, steps=3).ended_after() == pytest.approx(70, abs=2)
    group = Group(WAITS, LOCK)
    group.report(activity="exporting")
    assert group.ended_after() == pytest.approx(130, abs=2)
    assert Group(WAITS, LOCK, gap=4).ended_after() == pytest.approx(50, abs=2), "10 x 4 s"


def test_the_first_step_may_take_longer_before_it_counts_as_a_hang() -> None:
    group = Group(WAITS, LOCK, steps=0)
    assert group.ended_after(2000) == pytest.approx(601, abs=2)


CONNECT = {"text": stack("_create_c10d_store", "/venv/torch/distributed/rendezvous.py")}


def test_ranks_that_cannot_form_their_group_are_reported_within_a_minute() -> None:
    group = Group(CONNECT, CONNECT, steps=0)
    group.pass_time(60)
    where = group.world.report()["overdue"]["where"]
    assert where.startswith("rank 0 in _create_c10d_store (/venv/torch/distributed/rendezvous.py:12) (not all ranks")
    assert group.ended_after(590) is None
    group.report(step=1)
    assert group.world.report()["overdue"] is None


def test_ranks_that_wait_for_no_other_rank_are_not_reported_early_in_a_round() -> None:
    group = Group(LOCK, {**LOADER, **waits("asleep")}, steps=0)
    group.pass_time(590)
    assert group.world.report()["overdue"] is None


def test_a_check_that_a_member_did_not_answer_does_not_prove_a_hang() -> None:
    group = Group(WAITS, LOCK)
    group.pass_time(17)
    group.silent = {0}
    assert group.ended_after(100) is None
    group.silent = set()
    assert group.ended_after(300) is not None


def test_stacks_are_recorded_only_in_checks_that_may_prove_a_hang() -> None:
    group = Group(WAITS, {**LOCK, **waits("stopped")})
    assert group.ended_after() is not None
    sent = [fields["record"] for verb, fields in group.world.heard["job-0-0"] if verb == "look"]
    assert sent[:4] == [False, False, True, False] and sent.count(True) == 1


def test_a_pause_of_the_coordinator_does_not_prove_a_hang() -> None:
    group = Group(WAITS, LOCK)
    group.pass_time(18)
    group.world.coordinator.stood_still(10.0)
    assert group.ended_after() == pytest.approx(35, abs=2)


@pytest.mark.parametrize("text", ["\n", " ", 'File "', ' File "a", line 1 in f'])
def test_stacks_with_any_text_do_not_keep_the_coordinator_busy(text: str) -> None:
    began = time.process_time()
    standstill.is_in_collective((text * MAX_TRACEBACK)[:MAX_TRACEBACK])
    assert time.process_time() - began < 1

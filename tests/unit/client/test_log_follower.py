"""The ranks of pods and of log lines, and how `ddpjob logs` uses them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from ddpjob.cli.main import main
from ddpjob.cli.places import Place
from ddpjob.client.backends.backend import LogOptions, Mistake, PodLine
from ddpjob.client.logs import log_follower
from ddpjob.client.logs.log_follower import rank_of_line, ranks_of_pods, ranks_per_node


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll the pods only once an hour, so that no test passes just because the next poll finds the
    pod.
    """
    monkeypatch.setattr(log_follower, "_POLL", 3600.0)


def pod(name: str, role: str = "node", state: str = "Running") -> PodLine:
    index = None if role == "coordinator" else int(name.split("-")[1])
    return PodLine(name, role, index, state, ended=state not in ("Running", "Pending", "Terminating"))


@pytest.mark.parametrize(
    ("spec", "number"),
    [({}, 1), ({"gpusPerNode": 0}, 1), ({"gpusPerNode": 8}, 8), ({"gpusPerNode": 8, "procsPerNode": 2}, 2),
     ({"gpusPerNode": 8, "command": ["mpirun"]}, 0)],
)  # fmt: skip
def test_the_number_of_ranks_per_node_follows_from_the_spec(spec: dict[str, Any], number: int) -> None:
    assert ranks_per_node({"spec": spec}) == number


def test_ranks_are_numbered_by_the_slots_of_the_training_pods() -> None:
    pods = [pod("j-coordinator-0", "coordinator"), pod("j-0-9", state="Error"), pod("j-0-10", "spare"), pod("j-1-0"),
            pod("j-2-1"), pod("j-2-0", state="Error"), pod("j-3-0", state="Pending")]  # fmt: skip
    body = {"spec": {"gpusPerNode": 8}}
    assert ranks_of_pods(pods, body) == {"j-1-0": range(8), "j-2-1": range(8, 16)}
    assert ranks_of_pods(pods, {"spec": {"command": ["mpirun"]}}) == {"j-1-0": range(0), "j-2-1": range(0)}
    ended = [pod("j-0-0", state="Completed"), pod("j-1-0", state="Error"), pod("j-1-1", state="Completed")]
    assert ranks_of_pods([pod("j-0-0", state="Terminating"), pod("j-1-0")], {})["j-0-0"] == range(1)
    assert ranks_of_pods(ended, {}) == {"j-0-0": range(1), "j-1-1": range(1, 2)}


def status(ready: int, running: str = "GroupRuns", *, finished: int = 0, holds: bool = True) -> dict[str, Any]:
    condition = {"type": "Running", "status": str(holds), "reason": running, "message": "",
                 "lastTransitionTime": "2026-01-01T00:00:00Z"}  # fmt: skip
    slots = [{"state": "Succeeded"}] * finished + [{"state": "Running"}] * (2 - finished)
    return {"conditions": [condition], "nodes": {"ready": ready}, "slots": slots}


@pytest.mark.parametrize("pods_of_0", [
    [pod("j-0-0", state="Completed")], [pod("j-0-0", state="Error (1)"), pod("j-0-1", state="Pending")],
    [pod("j-0-0", state="Error (1)")], [pod("j-0-0", state="Terminating")], [pod("j-0-1", state="Pending")],
])  # fmt: skip
@pytest.mark.parametrize("seen", [
    status(2), status(1, finished=1), status(1, "GroupForming", holds=False), status(0, "GroupFinished", finished=1),
    status(1, "CoordinatorUnreachable"), {},
])  # fmt: skip
@pytest.mark.parametrize("known", [{}, {"j-0-0": range(1), "j-1-0": range(1, 2)}])
def test_a_node_keeps_its_rank_while_another_ends_or_is_replaced(
    pods_of_0: list[PodLine], seen: dict[str, Any], known: dict[str, range]
) -> None:
    assert ranks_of_pods([*pods_of_0, pod("j-1-0")], {"status": seen}, known)["j-1-0"] == range(1, 2)


def test_ranks_change_when_a_new_group_has_formed() -> None:
    known = {"j-0-0": range(1), "j-1-0": range(1, 2), "j-2-0": range(2, 3)}
    pods = [pod("j-0-1", state="Pending"), pod("j-1-0"), pod("j-2-0")]
    smaller = {"status": status(2, "GroupRunsSmaller")}
    assert ranks_of_pods(pods, smaller, known) == {"j-1-0": range(1), "j-2-0": range(1, 2)}
    pods[1] = pod("j-1-0", state="Completed")
    one_finished = {"status": status(1, "GroupRunsSmaller", finished=1)}
    assert ranks_of_pods(pods, one_finished) == {"j-1-0": range(1), "j-2-0": range(1, 2)}
    forming = {"status": status(1, "GroupForming", holds=False)}
    assert ranks_of_pods([pod("j-1-0"), pod("j-2-1")], forming, known) == {"j-1-0": range(1, 2), "j-2-1": range(2, 3)}
    assert ranks_of_pods(pods, {"status": status(3)}, known) == {"j-1-0": range(1, 2), "j-2-0": range(2, 3)}
    replaced = [pod("j-0-0", state="Error (1)"), pod("j-0-1"), pod("j-1-0"), pod("j-2-0")]
    assert ranks_of_pods(replaced, {"status": status(2, holds=False)}, known)["j-0-1"] == range(1)


@pytest.mark.parametrize(
    ("line", "rank"),
    [(b"loss 1", None), (b"[default3]:loss 1", 11), (b"[rank9]: Traceback", 9), (b"[rank3]: of another node", None),
     (b"[default8]:", None), (b"[default99999999999]:", None), (b"text [rank9]:", None)],
)  # fmt: skip
def test_the_rank_of_a_line_is_read_from_the_prefix_of_torchrun_or_torch(line: bytes, rank: int | None) -> None:
    assert rank_of_line(line, range(8, 16)) == rank


def test_every_line_of_a_pod_with_one_rank_belongs_to_that_rank() -> None:
    assert rank_of_line(b"[rank0]: quoted", range(3, 4)) == 3
    assert rank_of_line(b"of a spare", range(0)) is None


class TwoNodes:
    """A backend with one job: two nodes of two ranks each, and a spare. Node 1 is replaced after it
    has been read once.
    """

    where = "here"

    def __init__(self, **spec: Any) -> None:
        self.body = {"metadata": {"name": "j"}, "spec": {"procsPerNode": 2, **spec}, "status": {}}
        self.looks = 0

    def job(self, name: str) -> dict[str, Any]:
        done = {"type": "Complete", "status": "True", "reason": "a", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        return {**self.body, "status": {"conditions": [{**done, "message": ""}]} if self.looks > 3 else {}}

    def jobs(self) -> list[dict[str, Any]]:
        return [self.body]

    def pods(self, name: str) -> list[PodLine]:
        self.looks += 1
        if self.looks == 1:
            return [pod("j-0-0"), pod("j-1-0"), pod("j-2-0", "spare")]
        return [pod("j-0-0"), pod("j-1-0", state="Error"), pod("j-1-1", "spare"), pod("j-2-0")]

    def log(self, pod: PodLine, options: LogOptions) -> Iterator[bytes]:
        yield b"%s\n[default0]:first\n[default1]:second\n" % pod.name.encode()


def printed(words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, **spec: Any) -> set[str]:
    backend = TwoNodes(**spec)
    monkeypatch.setattr(Place, "backend", lambda place, **options: backend)
    monkeypatch.setattr("ddpjob.client.logs.log_follower._POLL", 0.05)
    assert main(words.split()) == 0
    return set(capsys.readouterr().out.splitlines())


def test_printed_lines_begin_with_the_pod_and_its_ranks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert printed("logs j", capsys, monkeypatch) == {
        *("[0-0 ranks 0-1] j-0-0", "[0-0 rank 0] [default0]:first", "[0-0 rank 1] [default1]:second"),
        *("[1-0 ranks 2-3] j-1-0", "[1-0 rank 2] [default0]:first", "[1-0 rank 3] [default1]:second"),
        *("[2-0] j-2-0", "[2-0] [default0]:first", "[2-0] [default1]:second"),
    }


def test_a_rank_is_followed_to_the_pod_that_takes_it_over(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert printed("logs j -f --rank 3 --no-prefix", capsys, monkeypatch) == {
        *("j-1-0", "j-2-0", "[default1]:second"),
    }


def test_logs_refuses_ranks_that_do_not_exist(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = TwoNodes()
    monkeypatch.setattr(Place, "backend", lambda place, **options: backend)
    assert main(["logs", "j", "--rank", "4"]) == 2
    assert capsys.readouterr().err == "j has no rank 4; the ranks are 0 to 3\n"
    backend.body["spec"]["command"] = ["mpirun"]
    assert main(["logs", "j", "--rank", "0"]) == 2
    assert "rank: j runs a command, not torchrun, so it has no ranks; choose pods by index" in capsys.readouterr().err


class NodeZeroEnds(TwoNodes):
    """A job of two nodes that write their last lines after node 0 has ended and the status shows
    it.
    """

    def __init__(self, state: str, then: dict[str, Any], **spec: Any) -> None:
        super().__init__(**spec)
        self.state, self.then, self.asked, self.late = state, then, 0, threading.Event()

    def job(self, name: str) -> dict[str, Any]:
        self.asked += 1
        if self.late.is_set() and self.looks > 5:
            return super().job(name)
        return {**self.body, "status": status(2) if self.looks < 2 else self.then}

    def pods(self, name: str) -> list[PodLine]:
        self.looks += 1
        if self.looks > 3:
            self.late.set()
        return [pod("j-0-0", state="Running" if self.looks == 1 else self.state), pod("j-1-0")]

    def log(self, pod: PodLine, options: LogOptions) -> Iterator[bytes]:
        yield b"early\n"
        if options.follow:
            assert self.late.wait(60)
            yield b"late\n[rank1]: its own\n" if pod.index == 1 else b"late\n"


def follow(
    words: str, backend: TwoNodes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> set[str]:
    monkeypatch.setattr(Place, "backend", lambda place, **options: backend)
    monkeypatch.setattr("ddpjob.client.logs.log_follower._POLL", 0.05)
    assert main(words.split()) == 0
    return set(capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("state", "then"),
    [("Completed", status(1, finished=1)), ("Error (1)", status(1, "GroupForming", holds=False)),
     ("Terminating", status(2))],
)  # fmt: skip
def test_the_last_lines_of_a_node_belong_to_its_rank(
    state: str, then: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    zero = {"[0-0 rank 0] early", "[0-0 rank 0] late"}
    one = {"[1-0 rank 1] early", "[1-0 rank 1] late", "[1-0 rank 1] [rank1]: its own"}
    for words, lines in {"logs j -f --rank 1": one, "logs j -f --rank 0": zero, "logs j -f": zero | one}.items():
        assert follow(words, NodeZeroEnds(state, then, procsPerNode=1), capsys, monkeypatch) == lines


def test_unmarked_lines_of_a_pod_that_has_lost_the_rank_are_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    then = status(1, "GroupRunsSmaller")
    before = follow("logs j -f --rank 3", NodeZeroEnds("Error (1)", then), capsys, monkeypatch)
    assert before <= {"[1-0 ranks 2-3] early"}
    assert follow("logs j -f --rank 1", NodeZeroEnds("Error (1)", then), capsys, monkeypatch) == {
        *("[0-0 ranks 0-1] early", "[0-0 ranks 0-1] late"),
        *("[1-0 ranks 0-1] early", "[1-0 ranks 0-1] late", "[1-0 rank 1] [rank1]: its own"),
    }


def test_logs_read_the_job_only_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    backend = NodeZeroEnds("Running", {})
    assert follow("logs j", backend, capsys, monkeypatch) and backend.asked == 1


def test_ranks_follow_the_order_that_the_status_shows() -> None:
    pods = [pod("j-0-0"), pod("j-1-0"), pod("j-2-0"), pod("j-3-0", "spare")]
    body: dict[str, Any] = {"spec": {"gpusPerNode": 2}, "status": {**status(3), "rankOrder": [0, 2, 1]}}
    assert ranks_of_pods(pods, body) == {"j-0-0": range(2), "j-2-0": range(2, 4), "j-1-0": range(4, 6)}
    restarting = {**body, "status": {**status(3, holds=False), "rankOrder": [0, 2, 1]}}
    assert ranks_of_pods(pods, restarting)["j-2-0"] == range(2, 4), (
        "the last group's order applies until another group has formed"
    )
    others = {**body, "status": {**status(3), "rankOrder": [0, 4, 1]}}
    assert ranks_of_pods(pods, others)["j-2-0"] == range(4, 6), "an order for a different set of nodes does not apply"


def test_logs_of_a_pod_whose_init_container_failed_name_the_command_that_explains_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a pod that had failed was said to be waiting to start."""

    def refuse(one: PodLine, options: LogOptions) -> Iterator[bytes]:
        raise Mistake(f'container "trainer" in pod "{one.name}" is waiting to start: PodInitializing')

    backend = TwoNodes()
    monkeypatch.setattr(backend, "pods", lambda name: [pod("j-0-0", state="Error (7)"), pod("j-1-0")])
    monkeypatch.setattr(backend, "log", refuse)
    monkeypatch.setattr(Place, "backend", lambda place, **options: backend)
    assert main(["logs", "j"]) == 1
    said = capsys.readouterr().err
    assert "pod j-0-0: its program never started; run `ddpjob why j` to see what failed\n" in said
    assert 'pod j-1-0: container "trainer" in pod "j-1-0" is waiting to start' in said


@pytest.mark.parametrize(
    ("state", "says"), [("Completed", "nothing was printed: j-0-0"), ("Pending", "no logs yet: j-0-0")]
)
def test_terminated_pods_are_not_followed(
    state: str, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = TwoNodes()
    monkeypatch.setattr(
        backend, "pods", lambda name: [pod("j-coordinator-0", "coordinator"), pod("j-0-0", state=state)]
    )
    monkeypatch.setattr(backend, "log", lambda pod, options: iter(()))
    monkeypatch.setattr(Place, "backend", lambda place, **options: backend)
    assert main(["logs", "j"]) == 0
    assert capsys.readouterr().err == f"{says} is {state}\n"


def test_logs_do_not_wait_for_a_slot_that_does_not_exist(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = TwoNodes()
    monkeypatch.setattr(Place, "backend", lambda place, **options: backend)
    assert main(["logs", "j", "--index", "9"]) == 2
    assert capsys.readouterr().err == "j has no pod in slot 9; the slots are 0 to 2\n"


def test_all_lines_of_a_pod_that_starts_later_are_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: for a replacement that failed immediately, only the last line of its traceback
    was printed.
    """
    backend = TwoNodes()
    whole = [b"begins\n", b"fails\n", b"last\n"]
    monkeypatch.setattr(backend, "log", lambda pod, options: iter(whole[-(options.tail or 0) :]))
    assert follow("logs j -f --tail 1 --no-prefix --index 1", backend, capsys, monkeypatch) == {
        "begins",
        "fails",
        "last",
    }
    lines = list[str]()
    backend = TwoNodes()
    monkeypatch.setattr(backend, "log", lambda pod, options: lines.append(f"{pod.name} {options.tail}") or iter(()))
    follow("logs j -f --tail 1", backend, capsys, monkeypatch)
    assert sorted(lines) == ["j-0-0 1", "j-1-0 1", "j-1-1 None", "j-2-0 1"]


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("then", [[], [pod("j-1-0", state="Error (1)"), pod("j-1-1")]])
def test_following_a_pods_log_ends_with_the_pod_and_not_with_its_job(
    then: list[PodLine], local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod's name is never used again. Regression: the command waited for the job's end. On this
    machine, a log ends when its run ends.
    """
    backend, asked = TwoNodes(), list[str]()

    def pods(name: str) -> list[PodLine]:
        asked.append(name)
        return [pod("j-1-0")] if len(asked) < 4 else then

    def log(pod: PodLine, options: LogOptions) -> Iterator[bytes]:
        yield b"%s\n" % pod.name.encode()
        while local and len(asked) < 100:
            time.sleep(0.01)

    monkeypatch.setattr(backend, "job", lambda name: backend.body)
    monkeypatch.setattr(backend, "pods", pods)
    monkeypatch.setattr(backend, "log", log)
    monkeypatch.setattr(backend, "local", local, raising=False)
    options, chosen = LogOptions(follow=True), log_follower.Chosen("j-1-0")
    follower = log_follower.LogFollower(backend, backend.body, options, chosen)  # type: ignore[arg-type]
    monkeypatch.setattr("ddpjob.client.logs.log_follower._POLL", 0.05)
    assert [line.text for line in follower.lines()] == [b"j-1-0"]
    assert 4 <= len(asked) < 20

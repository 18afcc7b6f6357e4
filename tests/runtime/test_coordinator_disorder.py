"""Call the coordinator in an order that no correct member or operator would produce.

No call may raise an exception, because decisions would then be only half applied.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from coordinator_world import FAST, RESET, STANDARD, CoordinatorSettings, WorkerFailure, World
from ddpjob_runtime.coordinator import states
from ddpjob_runtime.coordinator.members import Member
from ddpjob_runtime.coordinator.states import State
from ddpjob_runtime.protocol import MemberState

HISTORIES = 800
TABLES: tuple[Any, ...] = (states.COORDINATOR_TRANSITIONS, states.ROUND_TRANSITIONS, states.MEMBER_TRANSITIONS)
WORLD = (
    ["hello"] * 3 + ["resume"] * 3 + ["group"] * 3 + ["time"] * 3 + ["resize", "patience", "order", "progress", "new"]
)
MEMBER = (
    ["ready"] * 4 + ["joined"] * 4 + ["finished", "fail", "lost", "lost", "leaving", "stacks", "note", "init", "gone"]
)


class Disorder:
    """One random sequence of calls."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.attempt, self.mode = self.chance.randrange(3), self.chance.choice([FAST, STANDARD])
        self.stops_in = self.chance.choice([None, "Forming", "Running", "Restarting"])
        size = {"min_nodes": self.chance.randint(1, 3), "hang_after": self.chance.choice([None, 5.0])}
        size["ordered"] = self.chance.random() < 0.5
        self.world = World(3, mode=self.mode, attempt=self.attempt, **size)
        self.members: list[Member] = []

    def number(self) -> int:
        """Draw the number of a current, past or unknown round."""
        last = self.world.coordinator.rounds.last_number
        return self.chance.choice([last, last, last, max(0, last - 1), 0, last + 1, last + 1_000_000])

    def run(self) -> None:
        for step in range(self.chance.randint(10, 120)):
            member = self.chance.choice(self.members) if self.members else None
            if member is not None and self.chance.random() < 0.5:
                self.speak(member, self.chance.choice(MEMBER))
            else:
                self.act(
                    self.chance.choice(
                        WORLD + ["stop"] * (step > 10 and self.world.coordinator.rounds.state == self.stops_in)
                    )
                )
            self.world.report()
            self.check_shortcuts()

    def check_shortcuts(self) -> None:
        """Check that cached values, which avoid a check of every member for each line, equal a full
        computation.
        """
        members, current = self.world.coordinator.members, self.world.coordinator.rounds.current
        assert members.ready_count == len(members.ready())
        assert current is None or current.drains == bool(current.draining())

    def speak(self, member: Member, what: str) -> None:
        """Send a line from a member. If the member is lost, the server passes on only failures."""
        chance, coordinator, number = self.chance, self.world.coordinator, self.number()
        if what == "fail":
            code, message = chance.choice([1, 75, -6, -9]), chance.choice(["ValueError: bug", RESET])
            failure = WorkerFailure(
                member.source, member.rank, 0, code, None, message, "", self.world.now - chance.random()
            )
            coordinator.failure(member, chance.choice([member.round, number, None]), failure)
        elif what == "lost":
            coordinator.lost(member, "its connection ended")
        elif what == "gone":
            coordinator.gone(member.pod, "the pod was deleted")
        elif member.state == MemberState.LOST:
            return
        elif what == "ready":
            coordinator.ready(member, chance.choice([member.round or 0, number]), "10.0.0.1", 4000)
        elif what == "stacks":
            coordinator.stacks(member, number, chance.randrange(4), "stack")
        elif what in ("joined", "finished"):
            getattr(coordinator, what)(member, number)
        elif what == "leaving":
            coordinator.leaving(member, "SIGTERM")
        elif what == "note":
            coordinator.note(member, "ColdWorkers", "")
        else:
            coordinator.init_failure(member, "no such script")

    def act(self, what: str) -> None:
        chance, coordinator = self.chance, self.world.coordinator
        if what == "hello":
            self.come(chance.randrange(5), None)
        elif what == "resume":
            world, state = chance.randint(1, 4), chance.choice(["Running", "Finished", "Ready"])
            place = {"round": self.number(), "rank": chance.randrange(world), "world": world, "state": state}
            self.come(chance.randrange(5), place)
        elif what == "group":
            self.group()
        elif what == "time":
            self.world.silent = {f"job-{index}-0" for index in range(chance.randint(0, 5))}
            self.world.pass_time(chance.choice([0.01, 0.3, 0.6, 3.1, 10, 16, 31, 61, 121]))
        elif what == "resize":
            nodes = chance.randint(1, 5)
            coordinator.resize(nodes, chance.randint(1, nodes))
        elif what == "patience":
            coordinator.set_patience(chance.choice([None, 3.0]), 1.0, 60.0)
        elif what == "order":
            coordinator.set_order([f"job-{index}-0" for index in chance.sample(range(6), chance.randint(0, 6))])
        elif what == "progress":
            coordinator.report_progress({"step": chance.randrange(9), "automatic": chance.random() < 0.5})
        elif what == "stop":
            coordinator.stop(False, "the job was suspended")
        elif chance.random() < 0.3:  # a new coordinator
            self.attempt += 1
            self.world.restart_coordinator(
                CoordinatorSettings(3, 2, mode=self.mode, attempt=self.attempt, hang_after=5.0)
            )
            self.members = []

    def come(self, index: int, resume: Any) -> None:
        member = self.world.try_hello(index, self.chance.choice([0, 0, 1]), self.chance.choice([1, 1, 2]), resume)
        if member is not None:
            self.members.append(member)

    def group(self) -> None:
        """Make all members ready. They usually then join, and sometimes also finish."""
        coordinator = self.world.coordinator
        for member in list(coordinator.members):
            if member.state != MemberState.LOST:
                coordinator.ready(member, member.round or 0, "10.0.0.1", 4000)
        for what, share in (("joined", 0.9), ("finished", 0.3)):
            if self.chance.random() < share:
                for member in list(coordinator.members):
                    getattr(coordinator, what)(member, coordinator.rounds.last_number)


def test_no_order_of_calls_raises_an_exception_and_every_transition_occurs(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: set[Any] = set()
    become = State.become

    def noted(state: State[Any], new: Any) -> None:
        before = state.now
        become(state, new)
        taken.add((type(new), before, new))  # states of two machines may be equal as strings

    monkeypatch.setattr(State, "become", noted)
    for seed in range(HISTORIES):
        Disorder(seed).run()
    allowed = {(type(a), a, b) for table in TABLES for a, row in table.items() for b in row}
    assert {(a, b) for _, a, b in allowed - taken} == set()

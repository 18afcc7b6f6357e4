"""The preflight from beginning to end, on every rank: look, meet, try each other, judge. Rank 0 leads, the others follow its notes."""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

from ddpjob_trainer import devices
from ddpjob_trainer.config import Config
from ddpjob_trainer.errors import ConfigError, PreflightError, first_line
from ddpjob_trainer.group import Group
from ddpjob_trainer.preflight import accelerators, clock, collective, folders, machine, names, reach, versions
from ddpjob_trainer.preflight.board import Board, node_name, say, within
from ddpjob_trainer.preflight.check import Check, Context, Nodes, Result, Seen, Status
from ddpjob_trainer.preflight.collective import Outcome
from ddpjob_trainer.preflight.reach import Failure, Listener
from ddpjob_trainer.preflight.report import Report
from ddpjob_trainer.rendezvous import meeting

CHECKS: tuple[Check[Any], ...] = (versions.CHECK, accelerators.CHECK, *names.CHECKS, *folders.CHECKS, *machine.CHECKS)
_NEEDED_FOR_A_GROUP = {"ranks", "versions", "devices", "own address", "reachability"}
_CONNECT_SECONDS, _CLOCK_SECONDS, _BYE_SECONDS, _LEAVE_SECONDS = 3.0, 2.0, 3.0, 5.0


@dataclass(frozen=True)
class Verdict:
    """The same on every rank; `sentence` is empty unless it failed."""

    failed: bool
    sentence: str


def conduct(config: Config, group: Group, publish: Callable[[Report], None]) -> Verdict:
    """Check all ranks together; ends within seconds, whatever happens. Raises PreflightError where the other ranks cannot be met.

    Rank 0 calls `publish` before any rank knows the verdict: a launcher ends all ranks when the first one leaves.
    """
    import torch.distributed as dist

    try:
        return Flight(config, group, publish).run()
    except dist.DistError as error:
        place = meeting()
        remedy = "see that its folder is there on every node, and stays" if place.file else "look at rank 0's output"
        raise PreflightError(f"rank {group.rank} on {node_name()} lost the store at {place}: {error}; {remedy}") from error


def require(config: Config, group: Group) -> None:
    """Before training. Raises PreflightError on every rank when a check fails; rank 0 prints the table."""
    verdict = conduct(config, group, Report.show)
    if verdict.failed:
        raise PreflightError(verdict.sentence)


class Flight:
    """One rank's part."""

    def __init__(self, config: Config, group: Group, publish: Callable[[Report], None]) -> None:
        self._config, self._group, self._settings, self._publish = config, group, config.preflight, publish
        for key in ("join_seconds", "step_seconds"):
            if getattr(self._settings, key) <= 0:
                raise ConfigError(f"preflight.{key}: {getattr(self._settings, key)} is not above 0")
        self._began = time.monotonic()
        self._leads_node = group.local_rank == 0

    def run(self) -> Verdict:
        """All of it."""
        join, step = self._settings.join_seconds, self._settings.step_seconds
        watchdog = threading.Timer(join + 8 * step + 15, self._give_up)
        watchdog.daemon = True
        watchdog.start()
        self._board = Board(self._group, join)
        self._board.put("hello", {"host": node_name(), "leader": self._group.rank - self._group.local_rank})
        devices.limit_threads(self._config.train.threads, self._group.local_world)
        if self._group.rank == 0:
            self._board.tell("token", secrets.token_hex(8))
        import torch

        token = self._board.hear("token", join, "rank 0")
        self._context = Context(self._config, self._group, torch.get_num_threads(), token)
        self._board.put("facts", self._look())
        try:
            return self._lead() if self._group.rank == 0 else self._follow()
        finally:
            watchdog.cancel()
            if self._group.rank == 0:
                self._remove_token()

    def _give_up(self) -> None:
        say(f"rank {self._group.rank} on {node_name()} does not come to an end, at: {self._board.stage_now}; leaving")
        os._exit(1)

    # ------------------------------------------------------------ on every rank

    def _look(self) -> dict[str, Any]:
        """What each check sees here, all at the same time: {name: {"value": ...} or {"problem": why not}}, and this node's listener."""
        checks = [check for check in CHECKS if self._leads_node or not check.per_node]
        self._board.stage("looking at " + ", ".join(check.name for check in checks))
        seen: dict[str, Any] = {}

        def look(check: Check[Any]) -> None:
            try:
                value = within(self._settings.step_seconds, f"looking at the {check.name}", lambda: check.look(self._context))
                seen[check.name] = {"value": asdict(value)}
            except OSError as error:
                seen[check.name] = {"problem": error.strerror or str(error)}
            except Exception as error:  # Whatever a driver or a file system raises is a finding, and is shown as one.
                seen[check.name] = {"problem": f"{'' if isinstance(error, PreflightError) else type(error).__name__ + ': '}{error}"}

        threads = [threading.Thread(target=look, args=(check,), daemon=True) for check in checks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._leads_node and self._group.world > 1:
            address = seen["own address"].get("value")
            if address is not None:
                port = reach.listen(address["address"], self._context.token)
                seen["listener"] = asdict(Listener(address["address"], port, address["interface"]))
        self._board.stage("waiting for rank 0's plan")
        return seen

    def _try_others(self, listeners: dict[int, Listener]) -> None:
        """This node's connections to the others, and whether rank 0's checkpoint folder is here."""
        me = self._group.rank
        self._board.stage("connecting to the other nodes")
        failures = reach.connect_all(me, listeners, self._context.token, _CONNECT_SECONDS)
        self._board.stage("looking for rank 0's file in the checkpoint folder")
        try:
            sees = within(self._settings.step_seconds, self._board.stage_now, lambda: folders.sees_token(self._context))
        except (OSError, PreflightError):
            sees = False  # The folder's own check has said why.
        self._board.put("row", {"failures": [asdict(failure) for failure in failures], "sees": sees})

    def _add_up(self) -> None:
        """The all-reduce, with everything that may go wrong in it as its outcome."""
        import torch.distributed as dist

        step = self._settings.step_seconds
        self._board.stage("forming a group and adding up")
        store = dist.PrefixStore("group", self._board.store)  # type: ignore[attr-defined]
        try:
            measure = lambda: collective.measure(self._config, self._group, store, step)  # noqa: E731
            outcome = within(2 * step + _LEAVE_SECONDS, self._board.stage_now, measure)
        except Exception as error:  # As above: a finding.
            outcome = Outcome(first_line(error))
        self._board.put("sum", asdict(outcome))

    def _follow(self) -> Verdict:
        join, step = self._settings.join_seconds, self._settings.step_seconds
        rank0 = "rank 0"
        plan = self._board.hear("plan", join + 2 * step, rank0)
        listeners = {int(leader): Listener(**listener) for leader, listener in plan["listeners"].items()}
        if self._group.rank in plan["leaders"]:
            self._try_others(listeners)
            self._board.stage("telling rank 0 the time")
            clock.answer(self._board, self._group.rank, 2 * step + _CLOCK_SECONDS * len(plan["leaders"]))
        self._board.stage("waiting for rank 0")
        longest = 4 * step + _CLOCK_SECONDS * len(plan["leaders"])
        if self._board.hear("go", longest, rank0) and self._group.rank in plan["ranks"]:
            self._add_up()
        verdict = self._board.hear("verdict", longest, rank0)
        self._board.put("bye", True)
        return Verdict(**verdict)

    # ------------------------------------------------------------ on rank 0

    def _lead(self) -> Verdict:
        board, step = self._board, self._settings.step_seconds
        hellos = board.gather("hello", range(self._group.world), self._settings.join_seconds, "a sign")
        facts = board.gather("facts", hellos, step + 2, "what it sees")
        nodes = Nodes.of({rank: hellos[rank] for rank in facts})
        results = [self._joined(hellos, facts)]
        results += [judge(check, facts, nodes, self._config, self._group.world) for check in CHECKS]
        results += self._together(nodes, facts)
        results.append(self._collective(nodes, results))
        report = Report.of(self._group.world, len(nodes.leaders), time.monotonic() - self._began, results)
        verdict = Verdict(report.failed, report.first_failure())
        try:
            self._publish(report)
        finally:
            board.tell("verdict", asdict(verdict))
        board.gather("bye", [rank for rank in facts if rank > 0], _BYE_SECONDS, "a farewell")
        return verdict

    def _joined(self, hellos: dict[int, Any], facts: dict[int, Any]) -> Result:
        world = self._group.world
        if len(facts) == world:
            return Result("ranks", Status.OK, f"all {world} here")
        never = [rank for rank in range(world) if rank not in hellos]
        silent = [rank for rank in hellos if rank not in facts]
        culprits = [f"rank {rank}: nothing heard of it" for rank in never]
        culprits += [f"rank {rank} on {hellos[rank]['host']}: silent since {self._board.stage_of(rank)}" for rank in silent]
        remedy = (
            "look at its own output; if it has not started, at its node; if it runs, see that it reaches rank 0 (MASTER_ADDR, MASTER_PORT)"
        )
        return Result("ranks", Status.FAIL, f"{len(facts)} of {world} here", tuple(culprits), remedy)

    def _together(self, nodes: Nodes, facts: dict[int, Any]) -> list[Result]:
        """What nodes find when they try each other: connections, the shared folder, clocks."""
        board, step, leaders = self._board, self._settings.step_seconds, nodes.leaders
        listeners = {rank: Listener(**facts[rank]["listener"]) for rank in leaders if "listener" in facts[rank]}
        board.tell("plan", {"leaders": leaders, "ranks": sorted(facts), "listeners": {r: asdict(at) for r, at in listeners.items()}})
        self._try_others(listeners)
        rows = board.gather("row", leaders, 3 * _CONNECT_SECONDS + step, "connections")
        failures = {leader: [Failure(**failure) for failure in row["failures"]] for leader, row in rows.items()}
        others = [leader for leader in leaders if leader != 0]
        sees = {leader: bool(rows[leader]["sees"]) for leader in others if leader in rows}
        board.stage("comparing clocks")
        offsets: dict[int, clock.Offset | None] = {0: clock.Offset(0.0, 0.0)}
        offsets |= {leader: clock.measure(board, leader, _CLOCK_SECONDS) if leader in rows else None for leader in others}
        return [
            reach.judge(failures, listeners, nodes.name),
            folders.judge_shared(sees, seen_of(folders.CHECKPOINTS, facts, nodes, self._config, self._group.world)),
            clock.judge(offsets, nodes.name, self._settings.clock_skew_seconds),
        ]

    def _collective(self, nodes: Nodes, results: list[Result]) -> Result:
        broken = [result.check for result in results if result.status is Status.FAIL and result.check in _NEEDED_FOR_A_GROUP]
        go = not broken and self._group.world > 1
        self._board.tell("go", go)
        if not go:
            status = Status.SKIPPED if broken else Status.OK
            return Result("all-reduce", status, f"not tried: {', '.join(broken)}" if broken else "one rank")
        self._add_up()
        step = self._settings.step_seconds
        found = self._board.gather("sum", nodes.name, 2 * step + _LEAVE_SECONDS, "the all-reduce")
        stages = {rank: self._board.stage_of(rank) for rank in nodes.name if rank not in found}
        outcomes = {rank: Outcome(**outcome) for rank, outcome in found.items()}
        backend = self._backend()
        return collective.judge(outcomes, stages, nodes, backend, self._settings.bandwidth_gbs)

    def _backend(self) -> str:
        return devices.choose(self._config.train.backend, self._group.local_rank).backend

    def _remove_token(self) -> None:
        token = folders.token_path(self._context)
        try:
            within(self._settings.step_seconds, f"removing {token}", lambda: token.unlink() if token.exists() else None)
        except (OSError, PreflightError) as error:
            print(f"warning: {token} was left behind: {error}", file=sys.stderr, flush=True)


def seen_of(check: Check[Any], facts: dict[int, Any], nodes: Nodes, config: Config, world: int) -> Seen[Any]:
    """The values that arrived for a check; a rank with another version may know fewer fields."""
    known = {field.name for field in fields(check.kind)}
    arrived = {rank: fact[check.name]["value"] for rank, fact in facts.items() if "value" in fact.get(check.name, {})}
    values = {rank: check.kind(**{name: content for name, content in value.items() if name in known}) for rank, value in arrived.items()}
    return Seen(values, nodes, config, world)


def judge(check: Check[Any], facts: dict[int, Any], nodes: Nodes, config: Config, world: int) -> Result:
    """The check's own judgement; FAIL where a look did not come to an end."""
    problems = {rank: fact[check.name]["problem"] for rank, fact in facts.items() if "problem" in fact.get(check.name, {})}
    if problems:
        remedy = "a mount, a name server or a driver does not answer there" if "no answer" in next(iter(problems.values())) else ""
        return Result(check.name, Status.FAIL, next(iter(problems.values())), nodes.ranks(problems), remedy)
    if not any(check.name in fact for fact in facts.values()):
        return Result(check.name, Status.SKIPPED, "no rank with LOCAL_RANK 0 is here")
    return check.judge(seen_of(check, facts, nodes, config, world))

"""Runs the preflight from beginning to end.

Every rank leaves its findings in the store, and rank 0 judges between steps.
"""

from __future__ import annotations

import faulthandler
import math
import secrets
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ddpjob_trainer.config.config import Config
from ddpjob_trainer.distributed import devices
from ddpjob_trainer.distributed.init_method import meeting
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import ConfigError, PreflightError, first_line
from ddpjob_trainer.preflight import checks, peers
from ddpjob_trainer.preflight.addresses import NodeAddress, network_stack, own_address
from ddpjob_trainer.preflight.exchange import Exchange, attempt, node_name
from ddpjob_trainer.preflight.facts import CHECKS, Check, Context
from ddpjob_trainer.preflight.results import Layout, PreflightReport, RankFinding, Result, Status, worst_first

_NEEDED_FOR_A_GROUP = {"ranks", "versions", "devices", "own address", "reachability"}
_CONNECT_SECONDS, _BYE_SECONDS, _LEAVE_SECONDS, _GRACE_SECONDS = 3.0, 3.0, 5.0, 15.0
_NFS_SECONDS = 3.0
"""Seconds that rank 0's file may take to appear on another node. A few seconds are enough, because
an NFS client asks its server about a name that the client has not seen yet.
"""


def conduct(config: Config, group: Group, publish: Callable[[PreflightReport], None]) -> str:
    """Check all ranks together, and return the worst failure in one sentence.

    The result is the same on every rank, and empty if no check failed. The preflight always ends
    within a limited time. Rank 0 calls `publish` with the report before any rank knows the outcome,
    because a launcher ends all ranks when the first one exits. Raises PreflightError or
    RendezvousError if the other ranks cannot be reached.
    """
    for key in ("join_seconds", "step_seconds"):
        if not 0 < (seconds := getattr(config.preflight, key)) <= 86400:
            raise ConfigError(f"preflight.{key}={seconds}: must be above 0 and at most 86400 (one day)")
    if not math.isfinite(config.preflight.free_gb):
        raise ConfigError(f"preflight.free_gb={config.preflight.free_gb}: must be a finite number, such as 0 or 1")
    # Every wait has a deadline, but torch's FileStore holds the GIL while it waits for a missing
    # folder, so no other Python thread can run. This timer does not need the GIL; it writes all
    # threads' stacks and ends the process with exit code 1.
    longest = config.preflight.join_seconds + 8 * config.preflight.step_seconds + _GRACE_SECONDS
    faulthandler.dump_traceback_later(longest, exit=True, file=2)
    preflight = _Preflight(config, group)
    try:
        return preflight.run(publish)
    except dist.DistError as error:
        where = meeting()
        remedy = "check that the folder exists on every node and is not removed" if where.file else "read rank 0's log"
        lost = f"rank {group.rank} on {node_name()} lost the store at {where}"
        raise PreflightError(f"{lost}: {first_line(error)}; {remedy}") from error
    finally:
        preflight.close()
        faulthandler.cancel_dump_traceback_later()


def require(config: Config, group: Group) -> None:
    """Run the preflight before training. Rank 0 prints the table.

    Raises PreflightError on every rank if a check fails.
    """
    if failure := conduct(config, group, PreflightReport.print):
        raise PreflightError(failure)


class _Preflight:
    """Runs one rank's part of the preflight. On rank 0, it also holds the results so far."""

    def __init__(self, config: Config, group: Group) -> None:
        self._config, self._group, self._began = config, group, time.monotonic()
        self._join, self._step = config.preflight.join_seconds, config.preflight.step_seconds
        self._mark, self._results = "", list[Result]()
        self._listener: peers.Listener | None = None

    def run(self, publish: Callable[[PreflightReport], None]) -> str:
        self._exchange = exchange = Exchange(self._group, self._join)
        rank, longest = self._group.rank, 4 * self._step + _GRACE_SECONDS
        exchange.stage("starting")
        devices.limit_threads(self._config.train.threads, self._group.local_world)
        start = exchange.decided(
            "start", lambda: {"stack": network_stack(), "mark": f".preflight-{secrets.token_hex(8)}"}, self._join
        )
        self._mark = start["mark"]
        context = Context(self._config, self._group, torch.get_num_threads(), start["stack"], start["mark"])
        exchange.post("facts", self._facts(context))
        plan = exchange.decided("plan", self._judge_facts, self._join + 2 * self._step)
        if rank in plan["leaders"]:
            addresses = {int(leader): NodeAddress(**note) for leader, note in plan["addresses"].items()}
            exchange.post("row", self._row(addresses))
        exchange.stage("waiting for rank 0")
        if exchange.decided("go", self._judge_nodes, longest) and rank in plan["ranks"]:
            exchange.post("sum", self._sum())
        failure = exchange.decided("verdict", lambda: self._verdict(publish), longest)
        exchange.post("bye", True)
        if rank == 0:  # Rank 0 may serve the store, so it exits last.
            exchange.gather("bye", plan["ranks"], _BYE_SECONDS)
        return str(failure)

    def close(self) -> None:
        """Close the listener, and remove rank 0's file from the checkpoint folder."""
        if self._listener is not None:
            self._listener.close()
        if self._group.rank == 0 and self._mark:
            mark = self._config.checkpoint_dir / self._mark
            _, problem = attempt(self._step, f"removing {mark}", lambda: mark.unlink() if mark.exists() else None)
            if problem:
                print(f"warning: {mark} cannot be removed: {problem}", file=sys.stderr, flush=True)

    # ------------------------------------------------------------ on every rank

    def _facts(self, context: Context) -> dict[str, Any]:
        """Run this rank's own checks concurrently, and return their findings.

        The first rank of a node adds the address of the node.
        """
        first = self._group.local_rank == 0
        chosen = [check for check in CHECKS if first or not check.per_node]
        self._exchange.stage("checking " + ", ".join(check.name for check in chosen))

        def find(check: Check) -> RankFinding:
            finding, problem = attempt(self._step, f"checking the {check.name}", lambda: check.find(context))
            silent = "repair the unresponsive mount, name server or driver on that node"
            return finding or RankFinding(problem, Status.FAIL, silent if "no response" in problem else check.remedy)

        with ThreadPoolExecutor(len(chosen) + 1) as pool:
            asked = pool.submit(attempt, self._step, "checking its own address", lambda: own_address(self._group))
            facts = {"findings": dict(zip((check.name for check in chosen), pool.map(find, chosen), strict=True))}
        own, problem = asked.result()
        if own and first and self._group.world > 1:
            token = secrets.token_hex(8)
            self._listener = peers.Listener(own.address, token)
            own = replace(own, port=self._listener.server_address[1], token=token)
        self._exchange.stage("waiting for rank 0's plan")
        return facts | ({"address": own, "problem": problem} if first else {})

    def _row(self, addresses: dict[int, NodeAddress]) -> dict[str, Any]:
        """Return this node's contacts with the other nodes, and whether it sees rank 0's file.

        Rank 0 has written this file to the checkpoint folder.
        """
        self._exchange.stage("connecting to the other nodes")
        contacts = peers.connect_all(self._group.rank, addresses, _CONNECT_SECONDS)
        self._exchange.stage(searching := "searching for rank 0's file in the checkpoint folder")
        # Ignore an error here, because the check of the checkpoint folder has already reported it.
        sees, _ = attempt(self._step, searching, self._sees_mark)
        return {"contacts": contacts, "sees": bool(sees)}

    def _sees_mark(self) -> bool:
        deadline = time.monotonic() + (_NFS_SECONDS if self._config.checkpoint.shared else 0)
        while not (found := (self._config.checkpoint_dir / self._mark).exists()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def _sum(self) -> peers.Sum:
        self._exchange.stage(adding := "forming a group and computing sums")
        store = dist.PrefixStore("group", self._exchange.store)  # type: ignore[attr-defined]
        config, seconds = self._config, 2 * self._step + _LEAVE_SECONDS
        found, problem = attempt(seconds, adding, lambda: peers.all_reduce(config, self._group, store, self._step))
        return found or peers.Sum(problem)

    # ------------------------------------------------------------ on rank 0, between the steps

    def _judge_facts(self) -> dict[str, Any]:
        """Judge the findings that each rank has collected by itself.

        Return the ranks that have joined, and the addresses of the nodes.
        """
        came = self._exchange.gather("stage", range(self._group.world), self._join)
        self._by_rank = facts = self._exchange.gather("facts", came, self._step + 2)
        self._layout = Layout.of({rank: came[rank] for rank in facts})
        self._results += [checks.joined(self._group.world, self._exchange.gather("stage", came, 0), facts)]
        for check in CHECKS:
            notes = {r: fact["findings"][check.name] for r, fact in facts.items() if check.name in fact["findings"]}
            # Fields are read by name, because a rank with a different version of the trainer may
            # send additional fields. The version check reports such a rank.
            findings = {r: RankFinding(n["value"], n["status"], n["remedy"], n["same"]) for r, n in notes.items()}
            self._results.append(checks.merge(check, findings, self._layout))
        self._addresses = {r: NodeAddress(**fact["address"]) for r, fact in facts.items() if fact.get("address")}
        return {"leaders": self._layout.leaders, "ranks": sorted(facts), "addresses": self._addresses}

    def _judge_nodes(self) -> bool:
        """Judge the nodes' addresses, connections, shared folder and clocks.

        Return whether the ranks can try to form a group.
        """
        config, layout, facts = self._config, self._layout, self._by_rank
        rows = self._exchange.gather("row", layout.leaders, 3 * _CONNECT_SECONDS + self._step)
        contacts = {r: {int(b): peers.Contact(**c) for b, c in row["contacts"].items()} for r, row in rows.items()}
        problems = {rank: fact["problem"] for rank, fact in facts.items() if fact.get("problem")}
        written = facts[0]["findings"]["checkpoint folder"]["status"] != Status.FAIL
        sees = {rank: bool(row["sees"]) for rank, row in rows.items() if rank}
        self._results += [
            checks.own_address(self._addresses, problems, layout),
            checks.reachability(contacts, self._addresses, layout),
            checks.shared_folder(sees, str(config.checkpoint_dir) if written else "", config.checkpoint.shared, layout),
            checks.clocks(contacts, layout, config.preflight.clock_skew_seconds),
        ]
        self._broken = [r.check for r in self._results if r.status is Status.FAIL and r.check in _NEEDED_FOR_A_GROUP]
        return not self._broken and self._group.world > 1

    def _judge_sums(self) -> Result:
        if self._broken:
            return Result("all-reduce", Status.SKIPPED, f"not tried: {', '.join(self._broken)} failed")
        if self._group.world == 1:
            return Result("all-reduce", Status.OK, "one rank")
        names, train = self._layout.name, self._config.train
        notes = self._exchange.gather("sum", names, 2 * self._step + _LEAVE_SECONDS)
        sums = {rank: peers.Sum(**note) for rank, note in notes.items()}
        stages = self._exchange.gather("stage", [rank for rank in names if rank not in sums], 0)
        silent, backend = {rank: note["at"] for rank, note in stages.items()}, devices.choose(train.backend, 0).backend
        return checks.all_reduce(sums, silent, self._layout, backend, self._config.preflight.bandwidth_gbs)

    def _verdict(self, publish: Callable[[PreflightReport], None]) -> str:
        results = worst_first([*self._results, self._judge_sums()])
        nodes, seconds = len(set(self._layout.leader.values())), time.monotonic() - self._began
        report = PreflightReport(self._group.world, nodes, seconds, tuple(results))
        try:
            publish(report)
        finally:
            # Send the verdict even if publishing the report fails, so that the other ranks do not
            # wait for it.
            self._exchange.publish("verdict", report.failure)
        return report.failure

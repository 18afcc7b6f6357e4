"""Evaluates all ranks' findings on rank 0, with pure functions that name the culprit and the
remedy.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from ddpjob_trainer.distributed.interfaces import is_loopback
from ddpjob_trainer.preflight.addresses import NodeAddress
from ddpjob_trainer.preflight.facts import Check
from ddpjob_trainer.preflight.peers import Contact, Sum
from ddpjob_trainer.preflight.results import Layout, RankFinding, Result, Status, gigabytes, listed, worst_first

_OK, _SKIPPED, _WARN, _FAIL = Status.OK, Status.SKIPPED, Status.WARN, Status.FAIL
_KERBEROS_SECONDS = 300.0
"""Largest clock difference that Kerberos allows by default (RFC 4120). Many network mounts use
Kerberos. S3 refuses requests from a machine whose clock is 15 minutes off."""


def joined(world: int, stages: dict[int, Any], here: Iterable[int]) -> Result:
    """Return FAIL if ranks never joined, or if they joined and then fell silent.

    `stages` contains the last note of each rank that joined. `here` are the ranks that have
    reported their findings.
    """
    missing = sorted(set(range(world)) - set(here))
    if not missing:
        return Result("ranks", _OK, f"all {world} joined")
    silent, unheard = "rank {} on {host}: silent since {at}", "rank {}: never joined"
    culprits = (silent.format(rank, **stages[rank]) if rank in stages else unheard.format(rank) for rank in missing)
    remedy = "read its log; if it has not started, check its node; if it is running, check that it can reach rank 0"
    value, remedy = f"{world - len(missing)} of {world} joined", f"{remedy} (MASTER_ADDR, MASTER_PORT)"
    return Result("ranks", _FAIL, value, tuple(culprits), remedy)


def merge(check: Check, findings: dict[int, RankFinding], layout: Layout) -> Result:
    """Return the worst result of a check: one rank's finding, or a difference between ranks."""
    names = layout.nodes if check.per_node else layout.ranks
    if not findings:
        return Result(check.name, _SKIPPED, "no rank with LOCAL_RANK 0 has joined")
    worst = min(findings.values(), key=lambda finding: list(Status).index(finding.status))
    if worst.status == _OK:
        values = dict.fromkeys(finding.value for finding in findings.values())
        results = [Result(check.name, _OK, listed(values, "; ...", most=3, by="; "))]
    else:
        bad = [rank for rank, finding in findings.items() if finding.status == worst.status]
        results = [Result(check.name, Status(worst.status), worst.value, names(bad), worst.remedy)]
    for name, (status, remedy) in check.same.items():
        norm, odd = differing({rank: found.same[name] for rank, found in findings.items() if name in found.same})
        if odd:
            others = ", ".join(sorted({findings[rank].same[name] for rank in odd}))
            value = f"{name} {norm}, but {others} on {len(odd)} of {len(findings)}"
            results.append(Result(check.name, status, value, names(odd), remedy.format(name=name, norm=norm)))
    return worst_first(results)[0]


def differing(values: dict[int, str]) -> tuple[str, list[int]]:
    """Return the most common value, and the ranks with a different value.

    If two values are equally common, the value of the lowest rank counts.
    """
    frequent = list(values.values())
    norm = max((values[rank] for rank in sorted(values)), key=frequent.count, default="")
    return norm, [rank for rank in sorted(values) if values[rank] != norm]


def own_address(addresses: dict[int, NodeAddress], problems: dict[int, str], layout: Layout) -> Result:
    """Return FAIL if gloo would announce a loopback address to the other nodes.

    The other nodes would then connect to themselves and wait.
    """
    name = "own address"
    if problems:
        remedy = "set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME to an existing interface"
        return Result(name, _FAIL, next(iter(problems.values())), layout.nodes(problems), remedy)
    several = len({own.stack for own in addresses.values()}) > 1
    if wrong := [rank for rank, own in addresses.items() if several and is_loopback(own.gloo)]:
        own = addresses[wrong[0]]
        value = (
            f"there, the host's name resolves to {own.gloo}, and gloo would announce that address to the other nodes"
        )
        remedy = f"set GLOO_SOCKET_IFNAME (probably to {own.interface or 'eth0'})"
        remedy += ", or give the host's name its real address in /etc/hosts"
        return Result(name, _FAIL, value, layout.nodes(wrong), remedy)
    return Result(name, _OK, listed(dict.fromkeys(map(str, addresses.values()))))


def culprits(failing: Iterable[tuple[int, int]]) -> dict[int, str]:
    """Return the nodes at fault: as few as possible, but at least one in each failing pair.

    A pair is (source, target). The result maps each node at fault to its failing directions. The
    node in the largest number of failing pairs is chosen first. If only one direction between two
    nodes fails, the target is blamed, because firewalls mostly filter incoming traffic. If both
    directions fail, nothing shows which of the two nodes is at fault, so both are named.
    """
    pairs = set(failing)
    remaining, found = set(pairs), set[int]()
    while remaining:
        score = {node: sum(node in pair for pair in remaining) for pair in remaining for node in pair}
        worst = sorted(node for node in score if score[node] == max(score.values()))
        targets = {target for _, target in remaining}
        chosen = [node for node in worst if node in targets] or worst
        undecided = len(worst) == 2 and {(worst[0], worst[1]), (worst[1], worst[0])} <= remaining
        found |= set(chosen if undecided else chosen[:1])
        remaining = {pair for pair in remaining if not set(pair) & found}
    return {node: _direction(node, pairs, found) for node in sorted(found)}


def _direction(node: int, pairs: set[tuple[int, int]], blamed: set[int]) -> str:
    """Return the directions in which a node's connections fail: "in", "out", or "in and out".

    Only the failing pairs with nodes that are not blamed count. If there are no such pairs, all of
    the node's failing pairs count.
    """
    own = {pair for pair in pairs if node in pair}
    decisive = {pair for pair in own if not set(pair) - {node} & blamed} or own
    comes_in, goes_out = (any(pair[side] == node for pair in decisive) for side in (1, 0))
    return "in and out" if comes_in and goes_out else "in" if comes_in else "out"


def reachability(contacts: dict[int, dict[int, Contact]], listeners: dict[int, NodeAddress], layout: Layout) -> Result:
    """Judge whether all nodes can connect to each other. A FAIL names the nodes at fault.

    `contacts` maps each source node's leader to its contacts, which are keyed by the target node's
    leader.
    """
    pairs = len(listeners) * (len(listeners) - 1)
    if pairs == 0:
        return Result("reachability", _OK, "one node")
    if silent := [leader for leader in listeners if leader not in contacts]:
        remedy = "read its log, because it has exited or hangs"
        return Result("reachability", _FAIL, "no report", layout.nodes(silent), remedy)
    failing = {(a, b): contact.problem for a, row in contacts.items() for b, contact in row.items() if contact.problem}
    if not failing:
        return Result("reachability", _OK, f"all {pairs} directed pairs of nodes connect")
    blamed = culprits(failing)
    (source, target), problem = next((pair, why) for pair, why in failing.items() if set(pair) & set(blamed))
    name, where, ports = layout.name, listeners[target], "TCP ports 1024-65535"
    tried = f"{name[source]} -> {name[target]} ({where.address}, port {where.port}): {problem}"
    how = {
        "in": f"allow incoming {ports} on {{interface}} at {{node}} from the other nodes",
        "out": f"allow outgoing {ports} at {{node}}",
        "in and out": f"open {ports} in both directions on {{interface}} at {{node}}",
    }
    remedies = [
        how[direction].format(node=name[node], interface=listeners[node].interface or listeners[node].address)
        for node, direction in blamed.items()
    ]
    if "MTU" in problem:
        remedies.append("compare the MTU of the nodes' interfaces (ip link) with that of the network")
    elif "blocked" not in problem:
        remedies.append("if the address is wrong, set GLOO_SOCKET_IFNAME")
    value = f"{len(failing)} of {pairs} directed pairs fail; {tried}"
    culprit = tuple(f"{name[node]} ({direction})" for node, direction in blamed.items())
    return Result("reachability", _FAIL, value, culprit, "; ".join(remedies))


def clocks(contacts: dict[int, dict[int, Contact]], layout: Layout, limit: float) -> Result:
    """Return WARN if a node's clock is certainly off by more than `limit` seconds.

    If a clock is off by more than five minutes, the result is FAIL. Each clock is measured against
    the clock of rank 0's node, through a contact in either direction, and judged by its distance
    from the median.
    """
    if len(layout.leaders) == 1:
        return Result("clocks", _OK, "one node")
    ahead = {0: (0.0, 0.0)}
    for leader in layout.leaders:
        for source, target, sign in ((leader, 0, -1), (0, leader, 1)):
            contact = contacts.get(source, {}).get(target, Contact(""))
            if contact.ahead is not None:
                ahead[leader] = sign * contact.ahead, contact.bound
    unknown = set(layout.leaders) - ahead.keys()
    seconds = [offset for offset, _ in ahead.values()]
    middle = statistics.median_low(seconds)
    apart = {leader: abs(offset - middle) - bound for leader, (offset, bound) in ahead.items()}
    error = max(0.001, *(bound for _, bound in ahead.values()))
    value = f"{max(seconds) - min(seconds):.3f} s apart (measured to within {error:.3f} s)"
    if wrong := sorted(leader for leader in apart if apart[leader] > limit):
        far = max(apart.values()) > _KERBEROS_SECONDS
        harm = "Kerberos and S3 refuse requests" if far else "log lines of different nodes cannot be put in order"
        culprit = tuple(f"{layout.name[leader]} ({ahead[leader][0] - middle:+.1f} s)" for leader in wrong)
        remedy = f"run NTP there (check chronyc tracking or timedatectl), because {harm}"
        return Result("clocks", _FAIL if far else _WARN, value, culprit, remedy)
    if unknown:
        return Result("clocks", _SKIPPED, "not measured: no connection with rank 0's node", layout.nodes(unknown))
    return Result("clocks", _OK, value)


def shared_folder(sees: dict[int, bool], path: str, shared: bool, layout: Layout) -> Result:
    """Return FAIL if the nodes' checkpoint folders contradict checkpoint.shared.

    Rank 0 has written a file. `sees` maps the leader of each other node to whether it sees this
    file. `path` is the checkpoint folder, or empty if rank 0 could not write there.
    """
    name = "shared folder"
    if not sees:
        return Result(name, _OK, "one node")
    if not path:
        return Result(name, _SKIPPED, "rank 0 could not write to the folder")
    wrong = layout.nodes(rank for rank, found in sees.items() if found != shared)
    if not wrong:
        return Result(name, _OK, f"checkpoint.shared={str(shared).lower()}, which matches the folders")
    remedy = "set checkpoint.shared=true; otherwise several nodes write the same files"
    if shared:
        remedy = "mount the same volume on all nodes, or set checkpoint.shared=false (each node then writes its own)"
    return Result(name, _FAIL, f"{path} is {'not ' if shared else ''}the same folder there as on rank 0", wrong, remedy)


def all_reduce(sums: dict[int, Sum], stages: dict[int, str], layout: Layout, backend: str, least: float) -> Result:
    """Return FAIL if a rank has no correct sum, and WARN if the bandwidth is below `least` GB/s.

    `stages` contains the last notes of the ranks that have not reported a sum.
    """
    name, log = "all-reduce", "read its log; with NCCL, set NCCL_DEBUG=INFO"
    if stages:
        value = f"no response while {next(iter(stages.values()))} ({backend})"
        return Result(name, _FAIL, value, layout.ranks(stages), log)
    if wrong := [rank for rank, found in sums.items() if found.problem]:
        problem, fault = (
            sums[wrong[0]].problem,
            "check the network, the driver and the devices there, because one of them corrupted the sum",
        )
        remedy = fault if "wrong" in problem else f"{log}; check GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        return Result(name, _FAIL, f"{problem} ({backend})", layout.ranks(wrong), remedy)
    slowest = min(sums.values(), key=lambda found: found.bandwidth)
    value = f"correct on {len(sums)} ranks ({backend}); {slowest.bandwidth:.2f} GB/s bus"
    value += f" ({gigabytes(slowest.bytes)}), {slowest.latency:.2f} ms"
    if len(layout.leaders) == 1:
        return Result(name, _OK, f"{value}; one node, so no network was used")
    if slowest.bandwidth < least:
        names = "GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, NCCL_IB_HCA"
        remedy = f"less than preflight.bandwidth_gbs={least:g}: check that the fast network is used ({names})"
        return Result(name, _WARN, value, (), remedy)
    return Result(name, _OK, value)

"""The conclusions that preflight draws about machines that are not available here."""

from __future__ import annotations

import itertools
import resource
import socket
import threading
import time
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from ddpjob_trainer import config
from ddpjob_trainer.distributed import devices
from ddpjob_trainer.distributed.devices import RankPlacement
from ddpjob_trainer.distributed.init_method import open_store
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import PreflightError
from ddpjob_trainer.preflight import addresses, checks, facts, peers
from ddpjob_trainer.preflight.addresses import NodeAddress
from ddpjob_trainer.preflight.exchange import within
from ddpjob_trainer.preflight.peers import Contact, Sum
from ddpjob_trainer.preflight.results import Layout, PreflightReport, RankFinding, Result, Status
from hypothesis import given
from hypothesis import strategies as st
from machine import slowness
from torch.distributed import TCPStore

GIB, HOME = 2**30, "rank 0's network"
Usage, Address = namedtuple("Usage", "total used free"), namedtuple("Address", "family address")


def layout(ranks: int, per_node: int = 1) -> Layout:
    """Return a layout of nodes a, b, ... with `per_node` ranks each."""
    return Layout.of({r: {"host": "abcdef"[r // per_node], "leader": r - r % per_node} for r in range(ranks)})


def context(
    *arguments: str, world: int = 1, local_rank: int = 0, local_world: int = 1, threads: int = 1
) -> facts.Context:
    group = Group(rank=local_rank, world=world, local_rank=local_rank, local_world=local_world)
    return facts.Context(config.load(None, list(arguments)), group, threads, HOME, ".mark")


def merged(name: str, *findings: RankFinding, per_node: int = 1) -> Result:
    """Return rank 0's row of a check."""
    (check,) = (check for check in facts.CHECKS if check.name == name)
    ranks = len(findings) * per_node if check.per_node else len(findings)
    step = per_node if check.per_node else 1
    return checks.merge(check, dict(zip(range(0, ranks, step), findings, strict=True)), layout(ranks, per_node))


@pytest.mark.parametrize("failure", [OSError("full"), None], ids=["error", "different data"])
def test_other_ranks_leave_no_file_in_the_checkpoint_folder(
    failure: OSError | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path) -> bytes:
        if failure is not None:
            raise failure
        return b"different"

    monkeypatch.setattr(Path, "read_bytes", read)
    given = replace(context(f"checkpoint.dir={tmp_path}"), group=Group(rank=1, world=2))
    with pytest.raises(PreflightError):
        facts.checkpoint_folder(given)
    assert list(tmp_path.iterdir()) == []


def test_no_rank_of_a_healthy_group_is_blamed() -> None:
    """Findings come from JSON, so their status is a plain string."""
    ok = merged("checkpoint folder", *(RankFinding("written", "OK") for _ in range(2)))  # type: ignore[arg-type]
    assert (ok.status, ok.culprit) == (Status.OK, ())


# ---------------------------------------------------------------- merging the findings of single ranks


def test_the_worst_finding_of_a_check_counts() -> None:
    fine, bad = RankFinding("fine"), RankFinding("bad", Status.FAIL, "repair it")
    warned = RankFinding("so so", Status.WARN, "improve it")
    assert merged("limits", fine, warned, bad, bad) == Result("limits", Status.FAIL, "bad", ("c", "d"), "repair it")
    assert merged("limits", fine, warned, fine).culprit == ("b",)
    assert merged("limits", fine, RankFinding("other")).value == "fine; other"
    assert merged("limits").status is Status.SKIPPED, "the first rank of the node is missing here"
    assert merged("devices", fine, fine, fine, bad, per_node=2).culprit == ("rank 3 on b",)


SOFTWARE = {"torch": "2.9.0", "CUDA": "12.8", "NCCL": "2.27.3", "trainer": "0.1.0", "Python": "3.12.1"}


@pytest.mark.parametrize("name", SOFTWARE)
def test_versions_that_differ_between_ranks_are_reported(name: str) -> None:
    same, other = RankFinding("v", same=SOFTWARE), RankFinding("v", same={**SOFTWARE, name: "other"})
    row = merged("versions", same, same, other, same, per_node=2)
    assert row.status is (Status.WARN if name == "Python" else Status.FAIL)
    assert (row.culprit, row.value) == (("rank 2 on b",), f"{name} {SOFTWARE[name]}, but other on 1 of 4")
    assert f"install {name} {SOFTWARE[name]} there" in row.remedy
    assert merged("versions", other, same).culprit == ("rank 1 on b",), (
        "if two versions are equally frequent, rank 0's is considered right"
    )


@pytest.mark.parametrize(
    ("change", "status", "value"),
    [
        ({}, "OK", "NVIDIA A100, driver 550.54, 39.0 GiB free"),
        ({"name": "NVIDIA V100"}, "WARN", "model NVIDIA A100, but NVIDIA V100 on 1 of 4"),
        ({"driver": "470.1"}, "WARN", "driver 550.54, but 470.1 on 1 of 4"),
        ({"free": 10 * GIB}, "WARN", "10.0 GiB of 40.0 GiB free"),
        ({"kind": "cpu"}, "FAIL", "device cuda, but cpu on 1 of 4"),
    ],
)
def test_devices_that_differ_or_have_too_little_memory_are_reported(
    change: dict[str, Any], status: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(
        name: str = "NVIDIA A100", driver: str = "550.54", free: int = 39 * GIB, kind: str = "cuda"
    ) -> RankFinding:
        monkeypatch.setattr(facts.devices, "choose", lambda *_: RankPlacement(torch.device(kind), "backend"))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 40 * GIB))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
        monkeypatch.setattr(facts, "_driver", lambda: driver)
        return facts.device(context())

    row = merged("devices", found(), found(), found(), found(**change), per_node=2)
    assert (row.status, row.culprit) == (status, () if status == "OK" else ("rank 3 on b",)) and value in row.value
    assert bool(row.remedy) == (status != "OK")


def test_if_a_rank_has_several_devices_the_one_it_trains_on_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has devices 2 and 3. It must not even open a context on device 1, which belongs to
    rank 0.
    """
    opened: list[torch.device] = []
    monkeypatch.setattr(facts.devices, "_count", lambda kind: 4 * (kind == "cuda"))
    monkeypatch.setattr(torch.cuda, "set_device", opened.append)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: opened.append(device) or (GIB, GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", str)
    assert facts.device(context("strategy=ddp_mp", "ddp_mp.devices=2", local_rank=1, world=2)).status is Status.OK
    assert set(opened) == {torch.device("cuda", 2)}


@pytest.mark.parametrize(
    ("text", "driver"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 UTC 2023\nGCC version: 12.2",
            "535.104.05",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86  Release Build  (dvs-builder)", "570.86"),
    ],
)
def test_the_driver_version_is_read_from_proc(
    text: str, driver: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(facts, "_DRIVER", tmp_path / "version")
    assert facts._driver() == driver


def test_more_threads_than_cores_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container has a limit of two CPUs on a machine with 64 cores, where torch would start 32
    threads per rank.
    """
    monkeypatch.setattr(devices, "cpu_limit", lambda: 2.0)
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda _: range(64))
    crowded = facts.cpu_threads(context(local_world=2, threads=32))
    assert (crowded.status, crowded.value) == (
        Status.WARN,
        "64 threads on 2 cores",
    ) and "train.threads" in crowded.remedy
    monkeypatch.setattr(devices, "cpu_limit", lambda: 0.5)
    alone = facts.cpu_threads(context(local_world=2, threads=1))
    assert alone.status is Status.OK, "each rank has at least one thread"


@pytest.mark.parametrize(("limit", "threads"), [(8.0, 4), (0.5, 1), (float("inf"), 32)])
def test_the_ranks_share_the_cores_that_the_container_may_use(
    limit: float, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = list[int]()
    monkeypatch.setattr(devices, "cpu_limit", lambda: limit)
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda _: range(64))
    monkeypatch.setattr(devices.torch, "set_num_threads", chosen.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    devices.limit_threads(0, local_world=2)
    devices.limit_threads(0, local_world=2, repeatable=True)
    devices.limit_threads(3, local_world=2, repeatable=True)
    assert chosen == [threads, 1, 3]


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, float("inf")),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, float("inf")),
        ({}, float("inf")),
    ],
)
def test_the_cpu_limit_of_a_container_is_read_from_its_cgroup(
    files: dict[str, str], cores: float, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert devices.cpu_limit(tmp_path) == cores


def test_low_limits_of_open_files_and_locked_memory_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(files: int, locked: int, infiniband: bool) -> RankFinding:
        limits = {resource.RLIMIT_NOFILE: files, resource.RLIMIT_MEMLOCK: locked}
        monkeypatch.setattr(facts.resource, "getrlimit", lambda which: (limits[which], -1))
        monkeypatch.setattr(facts, "_INFINIBAND", tmp_path if infiniband else tmp_path / "none")
        return facts.limits(context(world=4))

    few = found(256, -1, False)
    assert few.status is Status.WARN and "256 open files, " in few.value and "ulimit -n 65536" in few.remedy
    locked = found(-1, 2**26, True)
    assert locked.status is Status.WARN and "64 MiB" in locked.value and "InfiniBand" in locked.remedy
    assert found(-1, -1, True).status is found(65536, 2**16, False).status is Status.OK


def test_several_gpus_need_more_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL needs more than Docker's 64 MiB between the GPUs of a node."""
    monkeypatch.setattr(facts.shutil, "disk_usage", lambda _: Usage(2**26, 0, 2**26))
    assert facts.shared_memory(context(local_world=2)).status is Status.OK, "no GPUs"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    tight = facts.shared_memory(context(local_world=2))
    assert tight.status is Status.WARN and "--shm-size=1g" in tight.remedy
    assert facts.shared_memory(context()).status is Status.OK, "a single GPU needs no more"


def test_the_shared_memory_for_samples_of_unknown_size_is_reported_as_unknown() -> None:
    found = facts.shared_memory(context("data.name=houses.prices:read"))
    assert "the memory that data.workers need for data.name=houses.prices:read is unknown" in found.value
    assert "data.workers need 0" in facts.shared_memory(context("data.name=houses.prices:read", "data.workers=0")).value


def test_data_that_takes_too_long_to_count_is_compared_by_its_top_levels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If counting takes too long, the first two levels are compared instead."""
    for part, label in itertools.product(("train", "val"), range(3)):
        (tmp_path / part / str(label) / "more").mkdir(parents=True)
        (tmp_path / part / str(label) / "1.jpg").touch()
    files, entries = facts.COUNTED
    whole, hurried = facts.count(tmp_path, 60), facts.count(tmp_path, -1)
    assert whole == {files: "6", entries: "8"} and hurried == {}

    def compared(*found: dict[str, str]) -> Result:
        return merged("data folder", *(RankFinding("data", same=same) for same in found))

    assert compared(whole, {entries: "8"}, hurried).status is Status.OK, "an unknown count is not a difference"
    row = compared(whole, {entries: "7"}, whole)
    assert (row.status, row.culprit, row.value) == (Status.FAIL, ("b",), f"{entries} 8, but 7 on 1 of 3")
    monkeypatch.setattr(facts, "time", SimpleNamespace(monotonic=itertools.count().__next__))
    assert facts.count(tmp_path, 3) == {entries: "8"}, (
        "the difference is known after three folders, before any deeper folder is read"
    )


def test_files_that_are_not_data_are_not_counted(tmp_path: Path) -> None:
    """The index of the shards and files left by desktops and file systems are not counted. An empty
    folder is a fault.
    """
    with pytest.raises(PreflightError, match="the folder is empty"):
        facts.count(tmp_path, 60)
    for name in ("a.tar", "b/c.tar"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    before = facts.count(tmp_path, 60)
    for name in ("index.npz", ".index.npz.lock", ".DS_Store", "b/.hidden"):
        (tmp_path / name).touch()
    (tmp_path / "lost+found").mkdir(mode=0)
    assert facts.count(tmp_path, 60) == before
    ready, later = RankFinding("data", same=before), RankFinding("does not exist yet")
    assert merged("data folder", later, ready).status is Status.OK, "data.download lets the other nodes fetch the data"


# ---------------------------------------------------------------- addresses


def test_a_master_address_that_points_each_node_to_itself_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(stack: str, *found_at: str) -> RankFinding:
        entries = [(0, 0, 0, "", (address, 0)) for address in found_at]
        monkeypatch.setattr(facts.socket, "getaddrinfo", lambda *_, **__: entries)
        monkeypatch.setattr(facts, "network_stack", lambda: stack)
        return facts.master_address(context(world=2))

    monkeypatch.setenv("MASTER_ADDR", "m")
    monkeypatch.setenv("MASTER_PORT", "1")
    row = merged("master address", found(HOME, "127.0.0.1", "::1"), found("other", "127.0.0.1"))
    assert (row.status, row.culprit, row.value) == (
        Status.FAIL,
        ("rank 1 on b",),
        "m resolves to a loopback address, so each node would connect to itself",
    )
    assert "set MASTER_ADDR" in row.remedy
    row = merged("master address", *[found(HOME, "127.0.0.1")] * 2)
    assert row.status is Status.OK, "nodes that share a loopback interface are on one machine"
    row = merged("master address", *(found("other", at) for at in ("10.0.0.1", "10.0.0.1", "1.2.3.4")))
    assert (row.status, row.culprit) == (Status.WARN, ("rank 2 on c",)) and "10.0.0.1, but 1.2.3.4" in row.value
    row = merged("master address", found(HOME, "127.0.1.1"), *[found("other", "10.0.0.1")] * 2)
    assert row.status is Status.OK, "on rank 0's node, its own name resolves to a loopback address, as on Debian"


def test_an_address_that_others_cannot_use_is_reported() -> None:
    good, bad = NodeAddress("one", "10.0.0.1", "10.0.0.1", "eth0"), NodeAddress("two", "10.0.0.2", "127.0.1.1", "ib0")
    row = checks.own_address({0: good, 1: bad}, {}, layout(2))
    assert (row.status, row.culprit) == (Status.FAIL, ("b",)) and "GLOO_SOCKET_IFNAME (probably to ib0" in row.remedy
    assert checks.own_address({0: bad, 1: bad}, {}, layout(2)).value == "10.0.0.2 (ib0)", "all ranks are on one machine"
    assert checks.own_address({0: good}, {1: "interface x has no address"}, layout(2)).culprit == ("b",)


def test_the_interface_that_nccl_uses_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is a prefix unless it follows a =. An interface that has only an IPv6 address is
    accepted too.
    """
    for value in ("l", "nothing,lo", "=lo", "l:29500"):
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", value)
        own = addresses.own_address(Group())
        assert (own.interface, own.address) == ("lo", "127.0.0.1")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=l")
    with pytest.raises(OSError, match=r"interface l \(.*NCCL_SOCKET_IFNAME\)"):
        addresses.own_address(Group())
    found = {"ib0": [Address(socket.AF_INET6, "fe80::1%ib0"), Address(socket.AF_INET6, "2001:db8::7")]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found | {"down": [Address(socket.AF_PACKET, "02:00")]})
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib")
    own = addresses.own_address(Group())
    assert (own.interface, own.address) == ("ib0", "2001:db8::7")


# ---------------------------------------------------------------- connections and clocks


@pytest.mark.parametrize(
    ("failing", "blamed"),
    [
        ([], {}),
        ([(0, 1)], {1: "in"}),
        ([(0, 1), (1, 0)], {0: "in and out", 1: "in and out"}),
        ([(0, 1), (2, 1)], {1: "in"}),
        ([(1, 0), (1, 2)], {1: "out"}),
        ([(0, 1), (1, 0), (2, 1), (1, 2)], {1: "in and out"}),
        ([(0, 1), (2, 1), (3, 1), (4, 1), (0, 3), (1, 3), (2, 3), (4, 3)], {1: "in", 3: "in"}),
    ],
)
def test_the_node_that_failing_pairs_have_in_common_is_blamed(
    failing: list[tuple[int, int]], blamed: dict[int, str]
) -> None:
    assert checks.culprits(failing) == blamed


@given(st.integers(2, 7).flatmap(lambda n: st.sets(st.sampled_from(list(itertools.permutations(range(n), 2))))))
def test_every_failing_pair_has_a_culprit_and_no_other_node_is_blamed(failing: set[tuple[int, int]]) -> None:
    blamed = checks.culprits(failing)
    assert all(set(pair) & blamed.keys() for pair in failing)
    assert all(any(node in pair for pair in failing) for node in blamed)


NODES = {0: NodeAddress("s", "10.0.0.1", "", "eth0", 1), 1: NodeAddress("t", "10.0.0.2", "", "eth1", 2)}


def test_a_reachability_fault_is_reported_with_direction_and_remedy() -> None:
    """Only packets from node a to b are lost. A node that does not report is also named as a
    culprit.
    """
    lost = {0: {1: Contact("no response: blocked")}, 1: {0: Contact("")}}
    row = checks.reachability(lost, NODES, layout(2))
    assert row.culprit == ("b (in)",) and row.value.endswith("a -> b (10.0.0.2, port 2): no response: blocked")
    assert row.remedy == "allow incoming TCP ports 1024-65535 on eth1 at b from the other nodes"
    third = {**NODES, 2: NodeAddress("u", "10.0.0.3", "", "eth2", 3)}
    out = {0: {1: Contact("Connection refused"), 2: Contact("Connection refused")}, 1: {}, 2: {}}
    row = checks.reachability(out, third, layout(3))
    assert row.culprit == ("a (out)",) and row.remedy.startswith(
        "allow outgoing TCP ports 1024-65535 at a; if the address"
    )
    row = checks.reachability({0: {1: Contact("")}}, NODES, layout(2))
    assert (row.status, row.culprit, row.value) == (Status.FAIL, ("b",), "no report")


def test_a_different_program_at_the_address_is_reported() -> None:
    """The other program accepts the connection and closes it, sends nothing, or is not running."""

    def tried(server: socket.socket, token: str = "token") -> str:
        return peers.connect(NodeAddress("", "127.0.0.1", port=server.getsockname()[1], token=token), 0.5).problem

    with socket.create_server(("127.0.0.1", 0)) as server:
        where = NodeAddress("", "127.0.0.1", port=server.getsockname()[1], token="token")
        assert "the node hangs, or another program" in tried(server)
        threading.Thread(target=lambda: [server.accept()[0].close() for _ in range(2)], daemon=True).start()
        assert "another program uses this address" in tried(server)
    assert peers.connect(where, 2).problem == "Connection refused"
    listener = peers.Listener("127.0.0.1", "token")
    assert tried(listener.socket) == "" and "another program" in tried(listener.socket, "other")
    where = NodeAddress("", "127.0.0.1", port=listener.server_address[1], token="token")
    listener.close()
    assert peers.connect(where, 2).problem == "Connection refused"


def test_only_clock_differences_that_are_certain_are_reported() -> None:
    """A slow round trip proves little: a difference of 2 s, measured with an error of up to 1.5 s,
    may really be 0.5 s. A measurement in either direction suffices.
    """

    def judged(there: Contact, back: Contact) -> Result:
        return checks.clocks({0: {1: there}, 1: {0: back}}, layout(2), 1.0)

    none = Contact("no response: blocked")
    assert judged(Contact("", 2.0, 1.5), none).status is Status.OK
    assert judged(Contact("", 2.0, 0.5), none).culprit == ("b (+2.0 s)",)
    assert judged(none, Contact("", -2.0, 0.5)).culprit == ("b (+2.0 s)",)
    assert (judged(none, none).status, judged(none, none).culprit) == (Status.SKIPPED, ("b",))


# ---------------------------------------------------------------- the all-reduce, the table,
# waiting


def test_a_slow_network_is_reported() -> None:
    sums = {rank: Sum("", 2**24, 0.11 * (rank + 1), 0.2) for rank in range(2)}
    slow = checks.all_reduce(sums, {}, layout(2), "gloo", 1.0)
    assert slow.status is Status.WARN and "0.11 GB/s bus (16 MiB)" in slow.value
    assert "preflight.bandwidth_gbs=1" in slow.remedy
    assert checks.all_reduce(sums, {}, layout(2), "gloo", 0.1).status is Status.OK
    assert checks.all_reduce(sums, {}, layout(2, 2), "gloo", 1.0).value.endswith("one node, so no network was used")
    silent = checks.all_reduce({0: sums[0]}, {1: "forming a group"}, layout(2), "gloo", 0.0)
    assert (silent.status, silent.culprit) == (Status.FAIL, ("rank 1 on b",)) and "forming a group" in silent.value


def test_the_table_shows_the_worst_result_first_with_its_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = Result("bad", Status.FAIL, "no", ("a", "b", "c", "d", "e"), "repair it")
    report = PreflightReport(4, 2, 1.0, tuple(checks.worst_first([Result("fine", Status.OK, "yes"), bad])))
    assert report.failure == "preflight: bad at a, b, c, d: no; repair it"
    report.print()
    assert capsys.readouterr().out.splitlines() == [
        "preflight of 4 rank(s) on 2 node(s): 1 FAIL, 1 OK (1.0 s)",
        "FAIL  bad   a, b, c, d and 1 more  no",
        "      -> repair it",
        "OK    fine                         yes",
    ]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    report.print()
    assert "\033[1;31mFAIL\033[0m  bad   a, b" in capsys.readouterr().out
    assert PreflightReport(1, 1, 1.0, report.results[1:]).failure == ""


def test_a_check_that_takes_too_long_is_abandoned() -> None:
    began = time.monotonic()
    with pytest.raises(PreflightError, match="no response within 0 s while asking"):
        within(0.1, "asking", lambda: time.sleep(30))
    assert time.monotonic() - began < 2 * slowness()
    with pytest.raises(ZeroDivisionError):
        within(5, "dividing", lambda: 1 // 0)


def test_training_does_not_inherit_the_short_store_timeout_of_preflight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for agents in ("False", "True"):  # with the plain store and with a prefixed one
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agents)
        monkeypatch.setenv("MASTER_PORT", str(server.port))
        group = Group(rank=1, world=2)
        store = open_store(group, 3.0)
        assert open_store(group, 900.0) is store and store.timeout.total_seconds() == 900.0

"""What preflight concludes from what ranks saw: machines that are not at hand here, as values."""

from __future__ import annotations

import itertools
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ddpjob_trainer import config
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.group import Group
from ddpjob_trainer.preflight import (
    accelerators,
    board,
    clock,
    collective,
    command,
    flight,
    folders,
    machine,
    names,
    reach,
    report,
    versions,
)
from ddpjob_trainer.preflight.check import Context, Nodes, Result, Seen, Status
from ddpjob_trainer.rendezvous import open_store
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import TCPStore

GIB = 2**30
GPU = accelerators.Device("cuda", "cpu:gloo,cuda:nccl", "", "NVIDIA A100", "550.54.15", 2, 39 * GIB, 40 * GIB)


def seen(values: list[Any], per_node: int = 2) -> Seen[Any]:
    """By rank, `per_node` ranks to a node (a, b, ...)."""
    nodes = Nodes.of({rank: {"host": "abcdef"[rank // per_node], "leader": rank - rank % per_node} for rank in range(len(values))})
    return Seen(dict(enumerate(values)), nodes, config.load(None, []), len(values))


@pytest.mark.parametrize(
    ("change", "status", "culprit", "value"),
    [
        ({}, "OK", (), "4 x NVIDIA A100, driver 550.54.15, 39.0 GiB free"),
        ({"name": "NVIDIA V100"}, "WARN", ("b",), "NVIDIA A100, but NVIDIA V100 there"),
        ({"driver": "470.1"}, "WARN", ("b",), "550.54.15, but 470.1 there"),
        ({"free": 10 * GIB}, "WARN", ("rank 3 on b",), "10.0 GiB of 40.0 GiB free"),
        ({"kind": "cpu"}, "FAIL", ("rank 3 on b",), "cuda, but cpu there"),
        ({"problem": "local rank 1 needs cuda device 1, and 1 are visible"}, "FAIL", ("rank 3 on b",), "local rank 1 needs cuda device 1"),
    ],
)
def test_devices(change: dict[str, Any], status: str, culprit: tuple[str, ...], value: str) -> None:
    result = accelerators.judge(seen([GPU, GPU, GPU, replace(GPU, **change)]))
    assert (result.status, result.culprit) == (status, culprit) and value in result.value
    assert bool(result.remedy) == (status != "OK")


@pytest.mark.parametrize(
    ("text", "driver"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version: 12.2", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86  Release Build  (dvs-builder)", "570.86"),
    ],
)
def test_driver_version(text: str, driver: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(accelerators, "_DRIVER", tmp_path / "version")
    assert accelerators._driver() == driver


@pytest.mark.parametrize("field", ["torch", "cuda", "nccl", "trainer"])
def test_versions_that_must_be_the_same(field: str) -> None:
    same = versions.Versions("2.9.0", "12.8", "2.27.3", "3.12.1", "0.1.0")
    result = versions.judge(seen([same, same, replace(same, **{field: "other"}), same]))
    assert (result.status, result.culprit) == (Status.FAIL, ("rank 2 on b",)) and "other" in result.value
    assert versions.judge(seen([same] * 4)).value == "torch 2.9.0, NCCL 2.27.3, Python 3.12.1"


def test_of_two_versions_as_frequent_rank_0s_is_the_norm() -> None:
    result = versions.judge(seen([versions.Versions("2.1"), versions.Versions("2.2")], 1))
    assert result.culprit == ("rank 1 on b",)


def test_threads_beyond_the_cores_of_a_node() -> None:
    """A container with a limit of two CPUs on a machine of 64 cores: torch would start 32 threads per rank."""
    result = machine.judge_threads(seen([machine.Threads(1, 2.0)] * 2 + [machine.Threads(32, 2.0)] * 2))
    assert (result.status, result.culprit, result.value) == (Status.WARN, ("b",), "64 threads on 2 cores")
    assert machine.judge_threads(seen([machine.Threads(1, 0.5)] * 4)).status is Status.OK, "one thread per rank is the least there is"


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
def test_the_cpu_limit_of_a_container(files: dict[str, str], cores: float, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert machine._quota(tmp_path) == cores


def test_limits() -> None:
    few = machine.judge_limits(seen([machine.Limits(1024, -1, False, 800), machine.Limits(256, -1, False, 800)], 1))
    assert (few.status, few.culprit) == (Status.WARN, ("b",)) and "ulimit -n 65536" in few.remedy
    pinned = machine.judge_limits(seen([machine.Limits(-1, -1, True, 800), machine.Limits(-1, 2**26, True, 800)], 1))
    assert (pinned.status, pinned.culprit) == (Status.WARN, ("b",)) and "64 MiB" in pinned.value and "InfiniBand" in pinned.remedy
    assert machine.judge_limits(seen([machine.Limits(-1, 2**16, False, 800)])).status is Status.OK


def test_shared_memory_of_gpus() -> None:
    """NCCL between a node's GPUs wants more than Docker's 64 MiB."""
    docker, enough = machine.SharedMemory(2**26, 2**26, 0, True), machine.SharedMemory(GIB, GIB, 0, True)
    result = machine.judge_shared_memory(seen([enough, docker], 1))
    assert (result.status, result.culprit) == (Status.WARN, ("b",)) and "--shm-size=1g" in result.remedy
    assert machine.judge_shared_memory(seen([replace(docker, gpus=False)])).status is Status.OK


def test_training_does_not_inherit_the_short_patience_of_preflight_with_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for agents in ("False", "True"):  # The store as it is, and with a prefix.
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agents)
        monkeypatch.setenv("MASTER_PORT", str(server.port))
        group = Group(rank=1, world=2)
        store = open_store(group, 3.0)
        assert open_store(group, 900.0) is store and store.timeout.total_seconds() == 900.0


def test_master_address() -> None:
    here, there = names.Master("one", "localhost", ("127.0.0.1", "::1")), names.Master("two", "localhost", ("127.0.0.1",))
    result = names.judge_master(seen([here, there], 1))
    assert (result.status, result.culprit) == (Status.FAIL, ("b",)) and "localhost is each node itself" in result.value
    assert names.judge_master(seen([here, here], 1)).status is Status.OK, "nodes that share a loopback are one machine"
    other = names.judge_master(
        seen([names.Master(str(i), "m", (address,)) for i, address in enumerate(("10.0.0.1", "10.0.0.1", "1.2.3.4"))], 1)
    )
    assert (other.status, other.culprit) == (Status.WARN, ("c",)) and "m is 10.0.0.1, but 1.2.3.4 there" in other.value
    debian = seen([names.Master("one", "a", ("127.0.1.1",)), *[names.Master("two", "a", ("10.0.0.1",))] * 2], 1)
    assert names.judge_master(debian).status is Status.OK, "its own name is a loopback address on rank 0's node, as Debian has it"


def test_the_interface_that_nccl_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are beginnings of names unless they follow a =; one that has an IPv6 address only is as good."""
    context = Context(config.load(None, []), Group(), 1, "")
    for told in ("l", "nothing,lo", "=lo", "l:29500"):
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", told)
        assert (names.look_address(context).interface, names.look_address(context).address) == ("lo", "127.0.0.1")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=l")
    with pytest.raises(OSError, match=r"interface l \(.*NCCL_SOCKET_IFNAME\)"):
        names.look_address(context)
    (tmp_path / "if_inet6").write_text(
        "fe800000000000000000000000000001 05 40 20 80     ib0\n20010db8000000000000000000000007 05 40 00 80     ib0\n"
    )
    monkeypatch.setattr(names, "_IPV6", tmp_path / "if_inet6")
    assert names.interface_address("ib0") == "2001:db8::7"


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
def test_the_node_that_failing_pairs_have_in_common(failing: list[tuple[int, int]], blamed: dict[int, str]) -> None:
    assert reach.culprits(failing) == blamed


@given(st.integers(2, 7).flatmap(lambda n: st.sets(st.sampled_from(list(itertools.permutations(range(n), 2))))))
def test_every_failing_pair_has_a_culprit_and_no_one_else_is_blamed(failing: set[tuple[int, int]]) -> None:
    blamed = reach.culprits(failing)
    assert all(set(pair) & blamed.keys() for pair in failing)
    assert all(any(node in pair for pair in failing) for node in blamed)


def test_a_listener_that_is_another_program() -> None:
    """It takes the connection and ends it, or is not there at all."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        import threading

        threading.Thread(target=lambda: server.accept()[0].close(), daemon=True).start()
        assert "another program has this address" in reach.connect(reach.Listener("127.0.0.1", port, "lo"), "token", 2)
    assert reach.connect(reach.Listener("127.0.0.1", port, "lo"), "token", 2) == "Connection refused"
    assert reach.connect(reach.Listener("127.0.0.1", reach.listen("127.0.0.1", "token"), "lo"), "token", 2) == ""
    assert "another program" in reach.connect(reach.Listener("127.0.0.1", reach.listen("127.0.0.1", "token"), "lo"), "other", 2)


def test_a_node_that_does_not_report_its_connections() -> None:
    listeners = {0: reach.Listener("10.0.0.1", 1, "eth0"), 1: reach.Listener("10.0.0.2", 2, "eth0")}
    result = reach.judge({0: []}, listeners, {0: "a", 1: "b"})
    assert (result.status, result.culprit, result.value) == (Status.FAIL, ("b",), "no report")


def test_clocks_are_only_blamed_for_what_is_sure() -> None:
    """A slow round trip tells little about the time: 2 s apart to within 1.5 s may be half a second."""
    nodes = {0: "a", 1: "b"}
    assert clock.judge({0: clock.Offset(0, 0), 1: clock.Offset(2.0, 1.5)}, nodes, 1.0).status is Status.OK
    assert clock.judge({0: clock.Offset(0, 0), 1: clock.Offset(2.0, 0.5)}, nodes, 1.0).culprit == ("b (+2.0 s)",)
    assert clock.judge({0: clock.Offset(0, 0), 1: None}, nodes, 1.0).culprit == ("b",)


def test_slow_network() -> None:
    nodes = seen([0, 0], 1).nodes
    outcomes = {rank: collective.Outcome("", 2**24, 0.11 * (rank + 1), 0.2) for rank in range(2)}
    slow = collective.judge(outcomes, {}, nodes, "gloo", 1.0)
    assert slow.status is Status.WARN and "0.11 GB/s bus (16 MiB)" in slow.value and "preflight.bandwidth_gbs=1" in slow.remedy
    assert collective.judge(outcomes, {}, nodes, "gloo", 0.1).status is Status.OK
    silent = collective.judge({0: outcomes[0]}, {1: "forming a group"}, nodes, "gloo", 0.0)
    assert (silent.status, silent.culprit) == (Status.FAIL, ("rank 1 on b",))


def test_data_that_is_too_much_to_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two levels are compared instead."""
    for part in ("train", "val"):
        for label in range(3):
            (tmp_path / part / str(label) / "more").mkdir(parents=True)
            (tmp_path / part / str(label) / "1.jpg").touch()
    whole, hurried = folders._count(tmp_path, 60), folders._count(tmp_path, -1)
    assert (whole.classes, whole.files) == (8, 6) and hurried.files == -1
    partly = replace(whole, files=-1)
    assert folders.judge_data(seen([whole, partly], 1)).status is Status.OK
    result = folders.judge_data(seen([whole, replace(partly, classes=7), whole], 1))
    assert (result.status, result.culprit) == (Status.FAIL, ("b",)) and "first two levels" in result.value
    assert folders.judge_data(seen([whole, partly, hurried], 1)).status is Status.OK, "unknown is no difference"
    assert folders.judge_data(seen([hurried, hurried], 1)).status is Status.OK
    monkeypatch.setattr(folders.time, "monotonic", itertools.count().__next__)
    assert folders._count(tmp_path, 3).classes == 8, "known after three folders, before any that lies deeper"


def test_data_that_only_some_nodes_have_yet(tmp_path: Path) -> None:
    """data.download fetches it to the others; the list of shards, a desktop's and a file system's own entries are no samples."""
    for name in ("a.tar", "b/c.tar"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    there = folders._count(tmp_path, 60)
    assert folders.judge_data(seen([folders.Data(str(tmp_path), needed=False), there], 1)).status is Status.OK
    for name in ("index.npz", ".index.npz.lock", ".DS_Store", "b/.hidden"):
        (tmp_path / name).touch()
    (tmp_path / "lost+found").mkdir(mode=0)
    assert folders._count(tmp_path, 60) == there


def test_report_on_a_terminal_and_as_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Result("fine", Status.OK, "yes"), Result("bad", Status.FAIL, "[no]", ("a", "b", "c", "d", "e"), "mend it")]
    made = report.Report.of(4, 2, 1.0, rows)
    assert [row.check for row in made.results] == ["bad", "fine"] and made.failed
    assert made.first_failure() == "preflight: bad at a, b, c, d: [no]; mend it"
    assert made.lines().splitlines() == [
        "preflight of 4 rank(s) on 2 node(s): 1 FAIL, 1 OK (1.0 s)",
        "FAIL  bad   a, b, c, d and 1 more  [no]",
        "      -> mend it",
        "OK    fine                         yes",
    ]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    made.show()
    shown = capsys.readouterr().out
    assert "┏━━" in shown and "[no]" in shown and "mend it" in shown


@pytest.mark.parametrize("key", ["join_seconds", "step_seconds"])
def test_times_that_are_none(key: str) -> None:
    with pytest.raises(ConfigError, match=f"preflight.{key}: 0.0 is not above 0"):
        flight.conduct(config.load(None, [f"preflight.{key}=0"]), Group(), lambda _: None)


def test_a_json_file_in_no_folder() -> None:
    with pytest.raises(ConfigError, match=r"--json /nowhere/r.json: its folder does not exist"):
        command.main(["--json=/nowhere/r.json"])


def test_what_takes_too_long_is_left_behind() -> None:
    import time

    began = time.monotonic()
    with pytest.raises(Exception, match="no answer within 0 s while asking"):
        board.within(0.1, "asking", lambda: time.sleep(30))
    assert time.monotonic() - began < 2
    with pytest.raises(ZeroDivisionError):
        board.within(5, "dividing", lambda: 1 // 0)

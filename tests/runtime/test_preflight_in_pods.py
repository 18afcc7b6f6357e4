"""spec.preflight in the pods: tests of the verdict, then real launchers with a defective node or
link.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ddpjob_runtime import hardware_check
from ddpjob_runtime.launcher.check_entrypoint import InitFailure
from ddpjob_runtime.launcher.conduct_preflight import (
    LinkVerdict,
    NodePreflight,
    NodeResult,
    PreflightSettings,
    judge,
    stages,
)
from machine import slowness
from networks import Network, need_namespaces, network
from runtime_harness import SCRIPTS, Job

STEPS = str(SCRIPTS / "steps.py")
FAULTS = str(SCRIPTS / "faulty")
SETTINGS = {"group": True, "seconds": 60, "least": 0, "gpus": 0, "resource": "", "backend": "auto", "folder": ""}


def result(rank: int, problem: str = "", rate: float = 900.0) -> NodeResult:
    return NodeResult(f"job-{rank}-0", f"host-{rank}", problem, rate, "gloo over TCP on eth0")


def check(
    world: int, bad: set[int] = frozenset(), links: set[frozenset[int]] = frozenset(), procs: int = 1
) -> LinkVerdict:  # type: ignore[assignment]
    """Return the verdict for a test in which the nodes `bad` fail with every partner, and the links
    `links` fail.
    """
    results: dict[str, dict[int, NodeResult]] = {}
    for stage, groups in stages(world, procs):
        results[stage] = {}
        for group in groups:
            fails = bad & set(group) or any(link <= set(group) for link in links)
            for rank in group:
                results[stage][rank] = result(rank, "it is broken" if fails and len(group) > 1 else "")
        verdict = judge(world, procs, results, least=0)
        if verdict is not None:
            return verdict
    raise AssertionError


@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize("procs", [1, 2])
def test_each_node_has_one_partner_per_stage_and_all_neighbours_are_tested(world: int, procs: int) -> None:
    pairs: list[tuple[int, ...]] = []
    for _, groups in stages(world, procs):
        members = [rank for group in groups for rank in group]
        assert len(members) == len(set(members))
        pairs += [group for group in groups if len(group) == 2 and world > 2]
    ring = {frozenset((rank, (rank + 1) % world)) for rank in range(world)} if world > 2 else set()
    assert {frozenset(pair) for pair in pairs} == ring
    assert len(pairs) == len(ring)


@pytest.mark.parametrize("world", [3, 4, 5, 8])
def test_one_bad_node_is_reported_at_any_position(world: int) -> None:
    for bad in range(world):
        verdict = check(world, {bad})
        assert list(verdict.culprits) == [bad], (world, bad)
        assert f"the links from pod job-{bad}-0 on Kubernetes node host-{bad}" in verdict.failed
        assert verdict.ends is None


def test_two_bad_nodes_are_reported_and_the_good_one_between_them_is_not() -> None:
    assert list(check(8, {2, 5}).culprits) == [2, 5]
    assert list(check(8, {2, 4}).culprits) == [2, 4]
    assert list(check(8, {0, 7}).culprits) == [7], "the next check finds the other bad node"


def test_a_bad_link_is_reported_with_both_nodes_and_blames_neither() -> None:
    verdict = check(4, links={frozenset((1, 2))})
    assert not verdict.culprits
    assert verdict.ends == 2
    assert "the link between pod job-1-0 on Kubernetes node host-1 and pod job-2-0" in verdict.failed
    verdict = check(2, {1})
    assert not verdict.culprits
    assert verdict.ends == 1
    assert "it is unknown which of the two is at fault" in verdict.failed


def test_if_every_test_fails_no_node_is_blamed() -> None:
    verdict = check(4, {0, 1, 2, 3})
    assert not verdict.culprits
    assert verdict.failed
    assert verdict.ends is not None


def test_a_node_that_fails_its_own_test_explains_the_failures_of_its_links() -> None:
    results = {
        stage: {rank: result(rank, "no NVLink" if 1 in group else "") for group in groups for rank in group}
        for stage, groups in stages(4, 2)
    }
    verdict = judge(4, 2, results, least=0)
    assert verdict is not None
    assert verdict.culprits == {1: "an all-reduce fails even within pod job-1-0 on Kubernetes node host-1: no NVLink"}


def test_a_slow_link_fails_only_below_the_required_bandwidth() -> None:
    def slow(least: float) -> LinkVerdict | None:
        results = {
            stage: {rank: result(rank, rate=50.0 if {2} & set(group) else 900.0) for group in groups for rank in group}
            for stage, groups in stages(4, 1)
        }
        return judge(4, 1, results, least)

    passed, failed = slow(0), slow(100)
    assert passed is not None and failed is not None
    assert passed.passed == "an all-reduce of 4 x 1 ranks is correct, 50 MB/s, via gloo over TCP on eth0"
    assert list(failed.culprits) == [2]
    assert "50 MB/s, less than the required 100 MB/s" in failed.failed


def test_a_slow_group_may_train_if_each_pair_of_nodes_is_fast() -> None:
    results = {
        stage: {r: result(r, rate=50.0 if stage == "group" else 900.0) for r in range(4)} for stage, _ in stages(4, 1)
    }
    verdict = judge(4, 1, results, least=100)
    assert verdict is not None
    assert not verdict.failed
    assert verdict.passed.endswith("but each pair of neighbours reaches 100 MB/s")


def test_every_node_reaches_the_same_verdict() -> None:
    verdict = check(5, {3})
    assert LinkVerdict.read(json.loads(json.dumps(verdict.write()))) == verdict


def test_unreadable_settings_are_reported_with_their_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DDPJOB_PREFLIGHT", raising=False)
    assert PreflightSettings.read() is None
    monkeypatch.setenv("DDPJOB_PREFLIGHT", '{"group": true}')
    with pytest.raises(InitFailure, match="DDPJOB_PREFLIGHT"):
        PreflightSettings.read()
    monkeypatch.setenv("DDPJOB_PREFLIGHT", json.dumps(SETTINGS))
    assert NodePreflight(PreflightSettings.read(), 1).wanted_seconds > 0  # type: ignore[arg-type]


def test_json_lines_printed_by_an_image_are_not_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("""print('{"level": "info", "message": "the image of the team"}')\n""")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    preflight = NodePreflight(PreflightSettings(False, 60, 0, 0, "", "auto", ""), 1)
    preflight.begin()
    assert preflight.node_problem(lambda: False) == ""


def test_the_transport_that_nccl_chose_is_read_from_its_log() -> None:
    head = "node1:123:456 [0] NCCL INFO "
    ib = f"{head}NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>\n{head}Using network IB\n"
    ib += f"{head}Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n"
    ib += f"{head}Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/0/GDRDMA\n"
    said = hardware_check.nccl_transport(ib)
    network = "network InfiniBand or RoCE on mlx5_0:1/IB, mlx5_1:1/RoCE, sockets on eth0"
    assert said == f"NCCL, {network}, channels via NET/IB and P2P/CUMEM"
    tcp = f"{head}NET/Socket : Using [0]eth1:10.0.0.2<0>\n{head}Using network Socket\n"
    assert hardware_check.nccl_transport(tcp) == "NCCL, network TCP on eth1"
    assert hardware_check.nccl_transport("") == "NCCL"


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_gloo_uses_the_interface_of_the_hosts_own_address(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes clusters with only IPv6."""
    interfaces = {**hardware_check._interfaces(), "10.1.2.3": "eth7"}
    known = address != "::1" or "0" * 31 + "1 " in Path("/proc/net/if_inet6").read_text()
    assert interfaces.get(address) == ("lo" if known else None)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(hardware_check, "_interfaces", lambda: {**interfaces, address: "eth8"})
    monkeypatch.setattr(hardware_check.socket, "gethostname", lambda: address)
    assert hardware_check._gloo_interface() == "eth8"


def test_a_folder_that_is_not_writable_is_reported(tmp_path: Path) -> None:
    assert hardware_check.folder_problem(tmp_path, "job-0-0") == ""
    assert list(tmp_path.iterdir()) == []
    gone = tmp_path / "gone"
    said = hardware_check.folder_problem(gone, "job-0-0")
    assert said == f"cannot write a 1 MiB file to the checkpoint folder {gone}: No such file or directory"


# --- with real launchers

WELL = "an all-reduce of 3 x 1 ranks is correct, "


@pytest.fixture
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Job]:
    pytest.importorskip("torch")
    job = Job(tmp_path, nodes=3, mode=request.param)
    yield job
    job.close()
    assert job.workers() == [], "processes were left behind"


def start(job: Job, fault: str = "", faulty: str = "", **settings: object) -> None:
    job.start_coordinator()
    for index in range(job.nodes):
        start_node(job, index, FAULT=fault, FAULTY=faulty, **settings)


def start_node(job: Job, index: int, attempt: int = 0, FAULT: str = "", FAULTY: str = "", **settings: object) -> None:
    preflight = json.dumps({**SETTINGS, "seconds": 60 * slowness(), **settings})
    env = {"PYTHONPATH": FAULTS, "FAULT": FAULT, "FAULTY": FAULTY, "GLOO_SOCKET_IFNAME": "lo"}
    job.start_node(index, STEPS, "--steps=5", attempt=attempt, DDPJOB_PREFLIGHT=preflight, **env)


@pytest.mark.slow
@pytest.mark.parametrize("job", ["Fast"], indirect=True)
def test_a_node_that_computes_incorrectly_exits_before_its_first_round(job: Job) -> None:
    start(job, "product", "job-1-0", group=False)
    assert job.wait_exit("job-1-0", 180) == 80, job.all_logs()
    end = job.end("job-1-0")
    assert end["message"].startswith("cpu: ")
    assert end["message"].endswith(" of 1024 rows of a matrix product are wrong")
    assert job.status()["round"] == 0
    start_node(job, 1, attempt=1, group=False)
    assert [job.wait_exit(name, 180) for name in ("job-0-0", "job-1-1", "job-2-0")] == [0, 0, 0], job.all_logs()
    assert WELL not in job.log("job-0-0").read_text(), "links are not checked"


@pytest.mark.slow
@pytest.mark.parametrize("job", ["Standard"], indirect=True)  # tests/local checks links in Fast.
def test_the_node_whose_sums_are_wrong_is_found_among_its_peers(job: Job) -> None:
    start(job, "sum", "job-1-0")
    assert job.wait_exit("job-1-0", 300) == 80, job.all_logs()
    said = job.end("job-1-0")["message"]
    assert said.startswith(
        "the links from pod job-1-0 to pod job-0-0 and pod job-2-0 fail: local rank 0: an all-reduce "
    ), said
    start_node(job, 1, attempt=1)
    report = job.wait_until(lambda r: r["notes"], 300)
    assert [(n["pod"], n["kind"]) for n in report["notes"]] == [("job-0-0", "Preflight")]
    assert report["notes"][0]["why"].startswith(WELL)
    assert report["notes"][0]["why"].endswith(" MB/s, via gloo over TCP on lo")
    assert {i["kind"] for i in report["incidents"]} == {"PeerLost"}, (
        "the ended pod explains each incident, so none counts as a failure"
    )
    assert [job.wait_exit(name, 180) for name in ("job-0-0", "job-1-1", "job-2-0")] == [0, 0, 0], job.all_logs()


def take_part(place: Network, rank: int, world: int, folder: Path, seconds: float) -> None:
    """Run one node's part of a link check, in the node's own network."""
    import torch.distributed as dist

    sys.stdout = sys.stderr = (folder / f"{rank}.log").open("w")
    place.enter(rank)
    os.environ.update(DDPJOB_POD=f"job-{rank}-0", GLOO_SOCKET_IFNAME="eth0")
    store = dist.TCPStore(place.address(0), 4999, is_master=rank == 0, wait_for_workers=False)
    settings = PreflightSettings(True, seconds, 8.0, 0, "", "auto", "")
    verdict = NodePreflight(settings, 1).check_links(store, rank, world, place.address(rank), lambda: False)
    (folder / f"{rank}.json").write_text(json.dumps(verdict.write()))
    if rank == 0:  # This pod has the store.
        store.wait([f"done/{other}" for other in range(1, world)])
    else:
        store.set(f"done/{rank}", "")


@pytest.mark.slow
def test_a_node_with_a_slow_link_is_found_on_a_real_network(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    need_namespaces()
    if shutil.which("tc") is None:
        pytest.skip("needs tc")
    with network(3) as place:
        place.run(1, "tc qdisc add dev eth0 root tbf rate 32mbit burst 32k latency 400ms")
        context = multiprocessing.get_context("fork")
        arguments = [(place, rank, 3, tmp_path, 60 * slowness()) for rank in range(3)]
        nodes = [context.Process(target=take_part, args=each) for each in arguments]
        for node in nodes:
            node.start()
        for node in nodes:
            node.join(600 * slowness())
            assert node.exitcode == 0, [path.read_text() for path in tmp_path.glob("*.log")]
    verdicts = [LinkVerdict.read(json.loads((tmp_path / f"{rank}.json").read_text())) for rank in range(3)]
    assert list(verdicts[0].culprits) == [1], verdicts[0]
    assert verdicts[0].failed.startswith("the links from pod job-1-0 to pod job-0-0 and pod job-2-0 fail: ")
    assert " MB/s, less than the required 8" in verdicts[0].failed
    assert verdicts == [verdicts[0]] * 3

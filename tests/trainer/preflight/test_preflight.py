"""Each test causes a real fault. The table must then report exactly this fault, its culprit and the
remedy.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from ddpjob_trainer import config
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import ConfigError, TrainerError
from ddpjob_trainer.preflight import command, conduct, exchange, facts, peers
from ddpjob_trainer.preflight.results import PreflightReport
from machine import free_port, slowness
from networks import Network, drop_packets, need_namespaces, network, own_mount
from ranks import TINY, metrics, run

QUICK = ["preflight.join_seconds=20", "preflight.step_seconds=8"]
Prepare = Callable[[int], None]


@dataclass
class Flown:
    """The result of a preflight of forked ranks, each on its own node."""

    codes: list[int | None]
    said: list[str]
    results: dict[str, dict[str, Any]]
    seconds: float

    def assert_only(self, check: str, status: str, culprit: str, value: str, remedy: str) -> None:
        """Assert that only this check is worse than OK, and that all ranks had the same result.
        Dependent checks may be skipped.
        """
        worse = {
            name: result["status"] for name, result in self.results.items() if result["status"] not in ("OK", "SKIPPED")
        }
        assert worse == {check: status}, self.said
        found = self.results[check]
        assert ", ".join(found["culprit"]) == culprit, found
        assert value in found["value"] and remedy in found["remedy"], found
        assert next(iter(self.results)) == check, "the worst result comes first"
        assert self.codes == [1 if status == "FAIL" else 0] * len(self.codes), self.said


def fly(
    folder: Path,
    world: int,
    *arguments: str,
    prepare: Prepare | None = None,
    env: Callable[[int], dict[str, str]] | None = None,
    absent: tuple[int, ...] = (),
    stopping: int | None = None,
    place: Network | None = None,
) -> Flown:
    """Run all ranks except `absent`. The rank `stopping`, which stops itself, is killed when the
    others have finished.
    """
    port, began = free_port(), time.monotonic()
    context = multiprocessing.get_context("fork")
    processes: list[Any] = []
    for rank in range(world):
        own = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": place.address(0) if place else "127.0.0.1",
            "MASTER_PORT": str(port),
            "DDPJOB_POD": f"node-{chr(97 + rank)}",
            "DDPJOB_CHECKPOINT_DIR": str(folder / "c"),
            **({"GLOO_SOCKET_IFNAME": "eth0"} if place else {}),
            **(env(rank) if env else {}),
        }
        if rank not in absent:
            processes.append(
                context.Process(
                    target=_rank, args=(own, [*QUICK, "train.threads=1", *arguments], prepare, folder, place)
                )
            )
            processes[-1].start()
    for rank, process in sorted(enumerate(processes), key=lambda entry: entry[0] == stopping):
        process.join(0 if rank == stopping else 60)
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
    report = folder / "report.json"
    rows = json.loads(report.read_text())["results"] if report.exists() else []
    said = [(folder / f"rank-{rank}.txt").read_text() for rank in range(world) if rank not in absent]
    return Flown(
        [process.exitcode for process in processes], said, {row["check"]: row for row in rows}, time.monotonic() - began
    )


def _rank(
    env: dict[str, str], arguments: list[str], prepare: Prepare | None, folder: Path, place: Network | None
) -> None:
    os.environ.update(env)
    rank, code = int(env["RANK"]), 70
    sys.stdout = sys.stderr = (folder / f"rank-{rank}.txt").open("w")
    torch.set_num_threads(1)
    try:
        if place is not None:
            place.enter(rank)
        if prepare is not None:
            prepare(rank)

        def publish(report: PreflightReport) -> None:
            report.write(folder / "report.json")
            report.print()

        code = int(bool(conduct.conduct(config.load(None, arguments), Group.from_env(), publish)))
    except TrainerError as error:
        print(f"error: {error}")
        code = 1
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten waits that always time out in these tests."""
    monkeypatch.setattr(conduct, "_CONNECT_SECONDS", 1.0)
    monkeypatch.setattr(conduct, "_LEAVE_SECONDS", 1.0)
    monkeypatch.setattr(conduct, "_NFS_SECONDS", 0.5)
    monkeypatch.setattr(exchange, "_DIAGNOSIS_SECONDS", 0.5)


def on(rank: int, action: Callable[[], object]) -> Prepare:
    """Return a hook that acts only on one rank."""
    return lambda current: action() and None if current == rank else None  # type: ignore[func-returns-value]


def all_ok(flown: Flown) -> None:
    assert {result["status"] for result in flown.results.values()} == {"OK"}, flown.said
    assert set(flown.codes) == {0}


# ---------------------------------------------------------------- no faults


def test_a_healthy_group_passes_every_check(tmp_path: Path) -> None:
    """Three nodes run on one machine. The file that shows whether a folder is shared is removed
    afterwards.
    """
    flown = fly(tmp_path, 3)
    all_ok(flown)
    assert "correct on 3 ranks (gloo)" in flown.results["all-reduce"]["value"]
    assert "all 6 directed pairs" in flown.results["reachability"]["value"]
    assert flown.seconds < 15 * slowness() and list((tmp_path / "c").iterdir()) == []
    assert flown.said[0].startswith("preflight of 3 rank(s) on 3 node(s): 14 OK") and flown.said[1:] == ["", ""]


def test_a_single_rank_passes_every_check(tmp_path: Path) -> None:
    flown = fly(tmp_path, 1)
    all_ok(flown)
    assert flown.results["all-reduce"]["value"] == "one rank"


# ---------------------------------------------------------------- software


@pytest.mark.parametrize(("switch", "new", "shown"), [("", True, " (nccl2)"), ("0", True, ""), ("", False, "")])
def test_ranks_compare_which_nccl_backend_they_use(
    switch: str, new: bool, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", switch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 1))
    name = "_create_nccl2_process_group"
    monkeypatch.setattr(torch.distributed.distributed_c10d, name, None, raising=False)
    if not new:
        monkeypatch.delattr(torch.distributed.distributed_c10d, name)
    assert facts.versions(None).same["NCCL"] == f"2.29.1{shown}"  # type: ignore[arg-type]


def test_a_different_torch_version_is_reported_before_a_group_is_formed(tmp_path: Path) -> None:
    flown = fly(tmp_path, 3, prepare=on(2, lambda: setattr(torch, "__version__", "1.7.0")))
    flown.assert_only(
        "versions", "FAIL", "rank 2 on node-c", "but 1.7.0 on 1 of 3", f"install torch {torch.__version__} there"
    )
    assert (
        flown.results["all-reduce"]["status"] == "SKIPPED"
        and "not tried: versions" in flown.results["all-reduce"]["value"]
    )


def test_a_different_python_version_causes_a_warning(tmp_path: Path) -> None:
    import platform

    flown = fly(tmp_path, 2, prepare=on(1, lambda: setattr(platform, "python_version", lambda: "3.9.1")))
    flown.assert_only("versions", "WARN", "rank 1 on node-b", "but 3.9.1 on 1 of 2", "run the same image")


# ---------------------------------------------------------------- network


@pytest.fixture
def nodes() -> Iterator[Network]:
    """Create a network of three nodes."""
    need_namespaces()
    with network(3) as made:
        yield made


def listener_loses(rank: int, longer_than: int = -1) -> Prepare:
    """Return a hook that drops everything sent to the listener of one node, as its firewall
    would.
    """

    class Filtered(peers.Listener):
        def server_activate(self) -> None:
            super().server_activate()
            drop_packets(self.socket, longer_than)

    return on(rank, lambda: setattr(peers, "Listener", Filtered))


def test_three_nodes_with_working_networks_pass(nodes: Network, tmp_path: Path) -> None:
    flown = fly(tmp_path, 3, place=nodes)
    all_ok(flown)
    assert flown.results["own address"]["value"] == "10.77.0.1 (eth0), 10.77.0.2 (eth0), 10.77.0.3 (eth0)"


@pytest.mark.parametrize(("world", "pairs"), [(3, "2 of 6"), (2, "1 of 2")])
def test_a_firewall_that_blocks_one_direction_is_reported(world: int, pairs: str, tmp_path: Path) -> None:
    """A host's firewall lets outgoing connections through but no incoming ones. The store works."""
    flown = fly(tmp_path, world, prepare=listener_loses(1))
    value = f"{pairs} directed pairs fail; node-a -> node-b ("
    remedy = "allow incoming TCP ports 1024-65535 on lo at node-b from the other nodes"
    flown.assert_only("reachability", "FAIL", "node-b (in)", value, remedy)
    assert "no response: blocked" in flown.results["reachability"]["value"]
    assert flown.results["all-reduce"]["value"] == "not tried: reachability failed"
    assert flown.results["clocks"]["status"] == "OK", "the difference was measured in the other direction"
    assert flown.seconds < 20 * slowness()


def test_a_node_whose_firewall_opens_only_the_stores_port_is_reported(nodes: Network, tmp_path: Path) -> None:
    """A cloud's security group may open only the documented port."""
    nodes.run(2, "ip rule add pref 10 ipproto tcp dport 29450 lookup main")
    nodes.run(2, "ip rule add pref 20 to 10.77.0.0/24 ipproto tcp blackhole")
    flown = fly(tmp_path, 3, place=nodes, env=lambda _: {"MASTER_PORT": "29450"})
    value = "4 of 6 directed pairs fail; node-a -> node-c (10.77.0.3, port "
    remedy = "open TCP ports 1024-65535 in both directions on eth0 at node-c"
    flown.assert_only("reachability", "FAIL", "node-c (in and out)", value, remedy)
    assert (flown.results["clocks"]["status"], flown.results["clocks"]["culprit"]) == ("SKIPPED", ["node-c"])


def test_a_path_that_loses_full_packets_is_reported(tmp_path: Path) -> None:
    """If a path's MTU is smaller than the interfaces report, a connection is established and then
    stalls.
    """
    flown = fly(tmp_path, 3, prepare=listener_loses(1, longer_than=1200))
    remedy = "compare the MTU of the nodes' interfaces"
    flown.assert_only("reachability", "FAIL", "node-b (in)", "full-size packets are lost", remedy)


def test_a_rank_that_cannot_reach_rank_0_is_reported_by_all_ranks(nodes: Network, tmp_path: Path) -> None:
    nodes.run(0, "ip route add blackhole 10.77.0.3/32")
    flown = fly(tmp_path, 3, "preflight.join_seconds=4", place=nodes)
    assert flown.codes == [1, 1, 1]
    assert "rank 2 on node-c could not reach rank 0 at 10.77.0.1:" in flown.said[2]
    assert "does not respond on TCP port" in flown.said[2]
    assert flown.results["ranks"]["culprit"] == ["rank 2: never joined"]
    assert flown.results["reachability"]["status"] == "OK", "the other connections were tested anyway"
    assert flown.seconds < 25 * slowness()


def test_a_host_name_that_makes_gloo_use_the_loopback_is_reported(nodes: Network, tmp_path: Path) -> None:
    """The host's name does not resolve to an address of this network, so gloo falls back to the
    loopback.
    """
    flown = fly(tmp_path, 2, place=nodes, env=lambda rank: {"GLOO_SOCKET_IFNAME": "" if rank else "eth0"})
    flown.assert_only(
        "own address",
        "FAIL",
        "node-b",
        "there, the host's name resolves to 127.0.0.1",
        "set GLOO_SOCKET_IFNAME (probably to eth0)",
    )


def test_an_interface_that_does_not_exist_is_reported(nodes: Network, tmp_path: Path) -> None:
    flown = fly(tmp_path, 2, place=nodes, env=lambda rank: {"GLOO_SOCKET_IFNAME": "eth7" if rank else "eth0"})
    assert flown.results["own address"]["culprit"] == ["node-b"]
    assert (
        "interface eth7" in flown.results["own address"]["value"]
        and "interfaces of this machine: lo, eth0" in flown.results["own address"]["value"]
    )


def test_a_name_of_rank_0_that_cannot_be_resolved_is_reported(tmp_path: Path) -> None:
    flown = fly(tmp_path, 2, "preflight.join_seconds=2", absent=(0,), env=lambda _: {"MASTER_ADDR": "rank0.invalid"})
    assert flown.codes == [1]
    assert (
        "the name rank0.invalid cannot be resolved here" in flown.said[0]
        and "check MASTER_ADDR and this node's DNS" in flown.said[0]
    )


# ---------------------------------------------------------------- ranks that do not join


def test_a_rank_that_never_joins_is_reported(tmp_path: Path) -> None:
    flown = fly(tmp_path, 3, "preflight.join_seconds=3", absent=(1,))
    assert flown.codes == [1, 1]
    assert flown.results["ranks"]["value"] == "2 of 3 joined"
    assert flown.results["ranks"]["culprit"] == ["rank 1: never joined"]
    assert flown.results["all-reduce"]["status"] == "SKIPPED"
    assert 3 < flown.seconds < 15 * slowness()


def test_a_rank_0_that_never_joins_is_reported(tmp_path: Path) -> None:
    flown = fly(tmp_path, 2, "preflight.join_seconds=2", absent=(0,))
    assert flown.codes == [1] and "check that rank 0 is running" in flown.said[0]


def test_a_rank_that_stops_is_reported_with_its_last_check(tmp_path: Path) -> None:
    """The rank stops permanently in the middle of its checks. It cannot report the cause, and the
    others finish without it.
    """
    stop = on(1, lambda: setattr(conduct, "own_address", lambda _: os.kill(os.getpid(), signal.SIGSTOP)))
    flown = fly(tmp_path, 3, "preflight.join_seconds=5", "preflight.step_seconds=2", prepare=stop, stopping=1)
    (culprit,) = flown.results["ranks"]["culprit"]
    assert culprit.startswith("rank 1 on node-b: silent since checking versions, devices, "), flown.said
    assert flown.codes == [1, -signal.SIGKILL, 1] and flown.seconds < 20 * slowness()


# ---------------------------------------------------------------- clocks, memory, folders


def test_clock_skew_is_reported_with_its_node(tmp_path: Path) -> None:
    flown = fly(tmp_path, 3, prepare=on(2, lambda: setattr(peers, "now", lambda: time.time() + 7.0)))
    assert flown.results["clocks"]["culprit"] == ["node-c (+7.0 s)"]
    assert (
        6.5 < float(flown.results["clocks"]["value"].split()[0]) < 7.5
        and "run NTP there" in flown.results["clocks"]["remedy"]
    )
    assert (flown.results["clocks"]["status"], flown.codes) == ("WARN", [0, 0, 0])


def test_clock_skew_of_rank_0_is_not_blamed_on_the_others(tmp_path: Path) -> None:
    """A skew that Kerberos would not accept is a failure."""
    flown = fly(tmp_path, 3, prepare=on(0, lambda: setattr(peers, "now", lambda: time.time() - 1000)))
    flown.assert_only("clocks", "FAIL", "node-a (-1000.0 s)", " s apart", "run NTP there")


def images(folder: Path) -> list[str]:
    """Create a folder of images with only the files that preflight reads."""
    for part in ("train", "val"):
        for name in ("cat", "dog"):
            (folder / part / name).mkdir(parents=True)
            (folder / part / name / "1.jpg").write_bytes(b"image")
    return ["data.name=imagefolder", f"data.dir={folder}"]


def test_too_small_shared_memory_is_reported_with_the_required_size(tmp_path: Path) -> None:
    """The loaders hold 128 / 2 training images and 64 test images of 224 x 224 x 3 bytes, four
    batches ahead. One node has 16 MB.
    """
    need_namespaces()
    arguments = [*images(tmp_path / "data"), "train.eval_batch=64"]
    flown = fly(tmp_path, 2, *arguments, prepare=on(1, lambda: own_mount(Path("/dev/shm"), "size=16m")))
    remedy = "set storage.sharedMemory of the DDPJob to 147Mi"
    flown.assert_only("/dev/shm", "FAIL", "node-b", "16 MiB free of 16 MiB; data.workers need 74 MiB", remedy)


def test_shared_memory_counts_the_size_of_test_images() -> None:
    from types import SimpleNamespace

    from ddpjob_trainer import config
    from ddpjob_trainer.preflight import facts

    def value(test: int) -> str:
        loaded = config.load(None, ["data.name=imagefolder", "data.workers=1", f"data.test_image_size={test}"])
        context: Any = SimpleNamespace(group=SimpleNamespace(world=1, local_world=1), config=loaded)
        return facts.shared_memory(context).value.split(";")[1]

    assert value(0) == value(224) != value(448)


def test_without_workers_a_small_shared_memory_is_sufficient(tmp_path: Path) -> None:
    need_namespaces()
    arguments = [*images(tmp_path / "data"), "data.workers=0"]
    all_ok(fly(tmp_path, 2, *arguments, prepare=on(1, lambda: own_mount(Path("/dev/shm"), "size=16m"))))


def test_a_read_only_checkpoint_folder_is_reported(tmp_path: Path) -> None:
    need_namespaces()
    (tmp_path / "c").mkdir()
    flown = fly(tmp_path, 2, prepare=on(1, lambda: own_mount(tmp_path / "c", "ro")))
    worse = {name: (row["status"], row["culprit"]) for name, row in flown.results.items() if row["status"] == "FAIL"}
    assert worse == {"checkpoint folder": ("FAIL", ["node-b"]), "shared folder": ("FAIL", ["node-b"])}
    assert "cannot be written: Read-only file system" in flown.results["checkpoint folder"]["value"]
    assert "mount it writable for uid 0, or set checkpoint.dir" in flown.results["checkpoint folder"]["remedy"]


def test_a_checkpoint_folder_that_is_not_shared_is_reported(tmp_path: Path) -> None:
    need_namespaces()
    (tmp_path / "c").mkdir()
    prepare = on(1, lambda: own_mount(tmp_path / "c", "size=2g"))
    flown = fly(tmp_path, 3, prepare=prepare)
    flown.assert_only(
        "shared folder", "FAIL", "node-b", "is not the same folder there as on rank 0", "or set checkpoint.shared=false"
    )


def test_a_shared_checkpoint_folder_is_reported_if_the_configuration_denies_it(tmp_path: Path) -> None:
    flown = fly(tmp_path, 2, "checkpoint.shared=false")
    flown.assert_only(
        "shared folder", "FAIL", "node-b", "is the same folder there as on rank 0", "set checkpoint.shared=true"
    )


def test_a_folder_per_node_is_accepted_if_the_configuration_sets_it(tmp_path: Path) -> None:
    all_ok(
        fly(
            tmp_path,
            2,
            "checkpoint.shared=false",
            env=lambda rank: {"DDPJOB_CHECKPOINT_DIR": str(tmp_path / str(rank))},
        )
    )


def test_too_little_space_for_checkpoints_is_reported(tmp_path: Path) -> None:
    need_namespaces()
    (tmp_path / "c").mkdir()
    flown = fly(tmp_path, 2, "checkpoint.shared=false", prepare=on(1, lambda: own_mount(tmp_path / "c", "size=8m")))
    flown.assert_only(
        "checkpoint folder",
        "WARN",
        "node-b",
        "8 MiB free",
        "free some space, lower checkpoint.keep, or use a larger volume; 1.0 GiB",
    )


def test_existing_checkpoints_count_towards_the_required_space(tmp_path: Path) -> None:
    need_namespaces()
    (tmp_path / "c").mkdir()

    def mount_and_fill() -> None:
        own_mount(tmp_path / "c", "size=20m")
        (tmp_path / "c" / "step-000000008.pt").write_bytes(bytes(2**23))

    flown = fly(tmp_path, 2, "checkpoint.shared=false", "preflight.free_gb=0.001", prepare=on(1, mount_and_fill))
    flown.assert_only("checkpoint folder", "WARN", "node-b", "12 MiB free", "16 MiB are needed")


def test_generated_data_and_data_in_a_store_need_no_folder() -> None:
    for keys in (["data.name=shapes"], ["data.name=shards", "data.url=s3://b/x", "data.dir=/nowhere"]):
        context = facts.Context(config.load(None, keys), Group(), 1, "", "")
        assert facts.data_folder(context).value.startswith("not needed")


def test_a_data_folder_missing_on_one_rank_is_reported(tmp_path: Path) -> None:
    arguments = images(tmp_path / "data")[:1]
    flown = fly(
        tmp_path, 3, *arguments, env=lambda rank: {"DDPJOB_DATA_DIR": str(tmp_path / ("data" if rank != 1 else "lost"))}
    )
    flown.assert_only(
        "data folder", "FAIL", "node-b", "No such file or directory", "mount the data there, or correct data.dir"
    )


def test_a_data_folder_with_fewer_files_on_one_rank_is_reported(tmp_path: Path) -> None:
    arguments = images(tmp_path / "data")[:1]
    images(tmp_path / "less")
    (tmp_path / "less" / "train" / "dog" / "1.jpg").unlink()
    flown = fly(
        tmp_path, 3, *arguments, env=lambda rank: {"DDPJOB_DATA_DIR": str(tmp_path / ("less" if rank == 1 else "data"))}
    )
    flown.assert_only("data folder", "FAIL", "node-b", "files 4, but 3 on 1 of 3", "copy the data there again")


def test_a_file_system_that_does_not_respond_is_reported_in_time(tmp_path: Path) -> None:
    """Opening a pipe without a writer blocks forever, like a dead NFS mount."""
    folder = tmp_path / "dead"
    folder.mkdir()
    os.mkfifo(folder / "pipe")
    flown = fly(tmp_path, 2, "data.name=imagefolder", f"data.dir={folder}", "preflight.step_seconds=2")
    found = flown.results["data folder"]
    assert found["culprit"] == ["node-a", "node-b"]
    assert found["value"] == "no response within 2 s while checking the data folder"
    assert found["remedy"] == "repair the unresponsive mount, name server or driver on that node"
    assert flown.seconds < 15 * slowness()


# ---------------------------------------------------------------- the all-reduce


def test_a_wrong_sum_in_the_all_reduce_is_reported(tmp_path: Path) -> None:
    plain = Group.sum

    def bent(self: Group, values: torch.Tensor) -> torch.Tensor:
        if values.numel() > 1000:
            values[17] += 1
        return plain(self, values)

    flown = fly(tmp_path, 2, prepare=on(1, lambda: setattr(Group, "sum", bent)))
    culprits = "rank 0 on node-a, rank 1 on node-b"
    flown.assert_only(
        "all-reduce", "FAIL", culprits, "1 of 262144 sums are wrong on cpu (gloo)", "check the network, the driver"
    )


def test_a_rank_that_hangs_in_the_all_reduce_is_reported(tmp_path: Path) -> None:
    """The rank never answers, so the others' collective times out."""
    hang = on(1, lambda: setattr(peers, "all_reduce", lambda *_: time.sleep(60)))
    flown = fly(tmp_path, 2, "preflight.step_seconds=2", prepare=hang)
    found = flown.results["all-reduce"]
    assert found["status"] == "FAIL" and "rank 1 on node-b" in found["culprit"], found
    assert flown.codes == [1, 1] and flown.seconds < 30 * slowness()


# ---------------------------------------------------------------- before training, and as a command


def test_training_starts_after_a_good_preflight_but_not_after_a_bad_one(tmp_path: Path) -> None:
    arguments = [*TINY, "train.epochs=1", "preflight.run=true", f"checkpoint.dir={tmp_path}"]
    assert [end.code for end in run(2, arguments)] == [0, 0]
    assert metrics(tmp_path / "run", "eval")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text()
    ended = run(2, arguments, prepare=on(1, lambda: setattr(torch, "__version__", "1.7.0")))
    assert [end.code for end in ended] == [1, 1]
    assert all("PreflightError: preflight: versions at rank 1 on" in end.error for end in ended), ended
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == lines


def test_the_command_prints_its_table_under_torchrun(tmp_path: Path) -> None:
    """The exit code is 1, and the table is printed before torchrun ends the ranks."""
    (tmp_path / "file").touch()
    base = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "ddpjob_trainer", "preflight"]
    command = [
        *base,
        f"--json={tmp_path / 'report.json'}",
        f"checkpoint.dir={tmp_path / 'file' / 'c'}",
        "train.threads=1",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["failed"], report["ranks"], report["nodes"]) == (True, 2, 1)
    assert "preflight of 2 rank(s) on 1 node(s)" in done.stdout and "Not a directory" in done.stdout
    assert "error: preflight: checkpoint folder at" in done.stderr and "cannot be removed" not in done.stderr


def test_the_command_prints_a_report_and_refuses_invalid_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cases are a single process and an invalid command line."""
    monkeypatch.setattr("ddpjob_trainer.lifecycle.fast_exit.leave_fast", lambda: None)
    assert command.main([f"--json={tmp_path / 'report.json'}", f"checkpoint.dir={tmp_path}", "train.threads=1"]) == 0
    assert "preflight of 1 rank(s) on 1 node(s): 14 OK" in capsys.readouterr().out
    assert json.loads((tmp_path / "report.json").read_text())["failed"] is False
    with pytest.raises(ConfigError, match=r"--json /nowhere/r.json: the folder does not exist"):
        command.main(["--json=/nowhere/r.json"])
    for key in ("join_seconds", "step_seconds"):
        with pytest.raises(ConfigError, match=f"preflight.{key}=0.0: must be above 0"):
            command.main([f"preflight.{key}=0"])
    for key in ("join_seconds", "step_seconds", "free_gb"):
        with pytest.raises(ConfigError, match=f"preflight.{key}=inf: must be "):
            command.main([f"preflight.{key}=inf", f"checkpoint.dir={tmp_path}"])


# ---------------------------------------------------------------- the file in which ranks meet


def test_the_loss_of_the_rendezvous_files_folder_is_reported_in_time(tmp_path: Path) -> None:
    """A volume may be unmounted. Each rank reports the loss, and no rank waits longer than the time
    limit for joining.
    """
    place = tmp_path / "meeting"
    place.mkdir()
    facts = conduct._Preflight._facts

    def remove_first(self: conduct._Preflight, context: Any) -> dict[str, Any]:
        self._exchange.gather("stage", range(2), 20)
        shutil.rmtree(place, ignore_errors=True)
        return facts(self, context)

    prepare = lambda _: setattr(conduct._Preflight, "_facts", remove_first)  # noqa: E731
    where = {"DDPJOB_TRAINER_INIT": f"file://{place}/file"}
    flown = fly(tmp_path, 2, "preflight.join_seconds=4", prepare=prepare, env=lambda _: where)
    assert flown.codes == [1, 1] and flown.results == {}, flown.said
    assert all(f"{place}/file" in said and "the folder exists" in said for said in flown.said), flown.said
    assert flown.seconds < 30 * slowness()


def test_preflight_exits_even_if_torch_waits_for_a_lost_rendezvous_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch then waits for five minutes while it holds the GIL, so no Python thread could end the
    process.
    """
    monkeypatch.setattr(conduct, "_GRACE_SECONDS", 0.0)
    prepare = lambda _: setattr(Path, "is_dir", lambda self: True)  # noqa: E731
    where = {"DDPJOB_TRAINER_INIT": f"file://{tmp_path}/gone/file"}
    arguments = ["preflight.join_seconds=1", "preflight.step_seconds=0.2"]
    flown = fly(tmp_path, 2, *arguments, prepare=prepare, env=lambda _: where)
    assert flown.codes == [1, 1] and flown.seconds < 15 * slowness()


def test_an_open_that_blocks_is_reported_in_time(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # opening a pipe for writing waits for a reader, like a dead NFS mount
    where = {"DDPJOB_TRAINER_INIT": f"file://{tmp_path}/pipe"}
    flown = fly(tmp_path, 2, "preflight.join_seconds=1", env=lambda _: where)
    assert flown.codes == [1, 1] and flown.seconds < 10 * slowness()
    assert all(f"no response within 1 s while opening {tmp_path}/pipe" in said for said in flown.said), flown.said

"""The rendezvous at the coordinator's store (Standard), with all members as threads of one
process.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, ClassVar

import pytest

dist = pytest.importorskip("torch.distributed")

from ddpjob_runtime.launcher.import_torchrun import import_torchrun  # noqa: E402

import_torchrun()
from ddpjob_runtime.launcher.rendezvous import FastRendezvous, StandardRendezvous  # noqa: E402
from ddpjob_runtime.store import serve  # noqa: E402
from listening import beyond_loopback, listening  # noqa: E402
from machine import slowness  # noqa: E402
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend  # noqa: E402
from torch.distributed.elastic.rendezvous.api import RendezvousParameters  # noqa: E402


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the coordinator's settings."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # as the launcher does
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))


class Client:
    """The coordinator's interface for the rendezvous handler: a call that begins a round, and
    whether the round is over.
    """

    why = "a node was lost"

    def __init__(self, rank: int, world: int) -> None:
        self.words: list[dict[str, Any]] = [{"round": 7, "rank": rank, "world": world, "members": []}]
        self.over, self.asked = threading.Event(), threading.Event()

    def wait_go(self, host: str, port: int, wanted: float) -> dict[str, Any] | None:
        self.asked.set()
        return self.words.pop(0) if self.words else None

    def must_restart(self, number: int) -> bool:
        return self.over.is_set()


class Shutdown:
    def block_if_begun(self) -> None:
        pass

    def exit(self, *why: Any) -> None:
        raise EOFError(why)


def handler(rank: int, world: int, store: Any) -> StandardRendezvous:
    settings = {"is_host": "false", "keep_alive_interval": "1", "last_call_timeout": "1", "join_timeout": "60"}
    endpoint = f"127.0.0.1:{store.port}"
    parameters = RendezvousParameters("c10d", endpoint, "job", 1, 1, local_addr=f"127.0.1.{rank}", **settings)
    client: Any = Client(rank, world)
    shutdown: Any = Shutdown()
    return StandardRendezvous(client, shutdown, "", parameters)


@pytest.mark.parametrize("world", [3, 40])
def test_members_get_the_coordinators_ranks_and_the_address_of_rank_0(world: int, store: Any) -> None:
    handlers = [handler(rank, world, store) for rank in range(world)]
    with ThreadPoolExecutor(world) as threads:
        infos = list(threads.map(lambda h: h.next_rendezvous(), handlers))
    assert [info.rank for info in infos] == list(range(world))
    assert {info.world_size for info in infos} == {world}
    first = infos[0].bootstrap_store_info
    where = first.master_addr, first.master_port
    assert where[0] == "127.0.1.0" and where in listening([os.getpid()])
    dist.TCPStore(*where, is_master=False, wait_for_workers=False).set("word", "of a worker")
    assert {(i.bootstrap_store_info.master_addr, i.bootstrap_store_info.master_port) for i in infos} == {
        (first.master_addr, first.master_port)
    }
    infos[0].store.set("word", "of all")
    assert infos[-1].store.get("word") == b"of all", "the members share the store"


def test_no_launcher_unpickles_content_from_the_store(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """c10d's own rendezvous unpickles it, so a client that can write to the store could run code on
    every node.
    """
    monkeypatch.setattr(Bomb, "exploded", [])
    store.set("torch.rendezvous.job", b64encode(pickle.dumps((Bomb(), 1))).decode())
    handlers = [handler(rank, 2, store) for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        assert [info.rank for info in threads.map(lambda h: h.next_rendezvous(), handlers)] == [0, 1]
    assert not Bomb.exploded
    state, _ = c10d_rendezvous_backend.create_backend(handlers[0]._parameters)[0].get_state() or (b"", None)
    pickle.loads(state)  # torchrun's DynamicRendezvousHandler does this
    assert Bomb.exploded == [1]


class Bomb:
    """A pickle that runs code."""

    exploded: ClassVar[list[int]] = []

    def __reduce__(self) -> Any:
        return Bomb.explode, ()

    @staticmethod
    def explode() -> None:
        Bomb.exploded.append(1)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_a_store_listens_only_on_its_own_address(host: str) -> None:
    before = listening([os.getpid()])
    try:
        made = serve(host)
    except OSError:
        if host != "::1":
            raise
        pytest.skip("this machine has no IPv6")
    [(address, port)] = listening([os.getpid()]) - before
    assert (address == host or host == "localhost") and port == made.port
    assert not beyond_loopback([(address, port)])
    client = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))
    client.set("key", "value")
    assert made.get("key") == b"value"


@pytest.mark.parametrize("host", ["", "203.0.113.1", "$(POD_IP)"])
def test_a_store_refuses_an_address_that_its_pod_does_not_have(host: str) -> None:
    before = listening([os.getpid()])
    with pytest.raises(OSError, match=r"cannot host a store on '.*', port 0: .*check POD_IP, torchrun's --local-addr"):
        serve(host)
    assert listening([os.getpid()]) == before


def test_a_store_reports_that_its_port_is_in_use() -> None:
    first = serve("127.0.0.1")
    with pytest.raises(OSError, match=f"port {first.port}: Address already in use"):
        serve("127.0.0.1", first.port)


def test_a_round_does_not_see_the_data_of_an_earlier_round(store: Any) -> None:
    earlier, later = handler(0, 2, store), handler(1, 2, store)
    later_client: Any = later._client
    later_client.words[0]["round"] = 8
    assert earlier.next_rendezvous().rank == 0
    threading.Timer(0.5, later_client.over.set).start()
    with pytest.raises(EOFError):  # The earlier round's address belonged to a rank 0 that is dead.
        later.next_rendezvous()


def test_members_leave_a_round_that_is_over_even_if_its_rank_0_never_arrived(store: Any) -> None:
    late = handler(1, 2, store)
    client: Any = late._client
    threading.Timer(0.2, client.over.set).start()
    with pytest.raises(EOFError):  # The member asks for the next round, which does not exist.
        late.next_rendezvous()
    assert client.words == []


@pytest.mark.parametrize("listens", [True, False])
def test_members_wait_for_a_store_whose_name_lookup_is_slow(
    listens: bool, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: torch looks up the name of the address before it connects, and each attempt timed
    out before the response.
    """
    tried = list[float]()

    def connect(host: str, port: int, timeout: timedelta, **more: Any) -> Any:
        tried.append(timeout.total_seconds())
        if not listens or tried[-1] < 10:
            raise dist.DistNetworkError("timed out")
        return store

    monkeypatch.setattr("ddpjob_runtime.launcher.rendezvous.TCPStore", connect)
    client: Any = Client(1, 2)
    shutdown: Any = Shutdown()
    handler = FastRendezvous(client, shutdown, "127.0.0.1", "job")
    port = store.port if listens else 1
    if listens:
        assert handler._connect("127.0.0.1", port) is store
        assert tried == [2, 25]
    else:
        threading.Timer(0.2, client.over.set).start()
        with pytest.raises(dist.DistStoreError):
            handler._connect("127.0.0.1", port)
        assert set(tried) == {2}


LEAN = """
import inspect, sys
hooks = len(sys.meta_path)
from ddpjob_runtime import lean_torch
from ddpjob_runtime.launcher.import_torchrun import import_torchrun
with lean_torch.for_rendezvous():
    import_torchrun()
import torch
from ddpjob_runtime.launcher import agent, conduct_preflight, rendezvous
print(torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).add("joined", 2))
kernels, no_data = sys.modules[lean_torch.META_KERNELS], torch.empty(3, 2, device="meta")
def distances():
    try:
        return torch.cdist(no_data, no_data).shape
    except NotImplementedError:
        return None
inspect.getmodule(agent), hasattr(kernels, "__warningregistry__")
print(distances(), torch._meta_registrations is kernels, len(sys.meta_path) == hooks)
print(kernels.activate_meta.__module__, type(kernels).__name__, distances())
"""


def test_kernels_for_meta_tensors_are_imported_only_on_demand() -> None:
    command = [sys.executable, "-c", LEAN]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120 * slowness(), check=False)
    assert done.stdout.splitlines() == [
        "2",
        "None True True",
        "torch._meta_registrations module torch.Size([3, 3])",
    ], done.stderr

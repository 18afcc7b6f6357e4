"""The operator's watch of Kubernetes nodes, tested with Node objects without kubelets."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from ddpjob.controller.host_watch import Hosts, HostWatch
from ddpjob.controller.kube.rest import Rest
from testcluster import processes
from testcluster.cluster import Cluster

NOBODY = {"key": "test.ddpjob.io/ghost", "effect": "NoSchedule"}


def use(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the kubeconfig. This is needed because the client read KUBECONFIG when it was
    imported.
    """
    monkeypatch.setattr("kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig))


@pytest.fixture
def ghost(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the name of a node that the test may create. Leftovers are removed."""
    use(cluster.kubeconfig, monkeypatch)
    name = f"ghost-{secrets.token_hex(2)}"
    yield name
    cluster.kubectl("delete", "node", name, "--ignore-not-found")


class Reported:
    """The watch's reports about one node: True or False for its readiness, `out` if it is tainted
    as out of service, None if it is gone.

    Kubernetes taints a new node as not ready and removes the taint soon. Reports before that are
    ignored.
    """

    def __init__(self, name: str) -> None:
        self.name, self.news = name, []  # type: str, list[object]
        self.calls = 0
        self._more = asyncio.Event()

    def __call__(self, hosts: Hosts | None, changed: frozenset[str]) -> None:
        assert hosts is not None
        self.calls += 1
        self._more.set()
        host = hosts.get(self.name)
        new = host is not None and any(key == "node.kubernetes.io/not-ready" for key, _, _ in host.taints)
        if self.name in changed and not new:
            gone = host is None or host.deleted
            self.news.append(None if gone else "out" if host.out_of_service else host.ready)

    async def until(self, *news: object) -> None:
        async with asyncio.timeout(60):
            while self.news != list(news):
                self._more.clear()
                await self._more.wait()


def create(cluster: Cluster, name: str) -> None:
    cluster.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "spec": {"taints": [NOBODY]}})


def beat(cluster: Cluster, name: str, ready: bool, beats: int) -> None:
    """Report as a kubelet does: the heartbeat changes each time, but the transition time changes
    only with the status.
    """
    moment = f"2030-01-01T00:00:{beats:02}Z"
    condition = {
        "type": "Ready",
        "status": str(ready),
        "lastHeartbeatTime": moment,
        "lastTransitionTime": f"2030-01-01T0{int(ready)}:00:00Z",
    }
    cluster.kubectl(
        "patch", "node", name, "--subresource=status", "--patch", json.dumps({"status": {"conditions": [condition]}})
    )


def watching(test: Callable[[HostWatch, Reported], Awaitable[None]], name: str) -> None:
    async def run() -> None:
        rest, reported = await Rest.connect(), Reported(name)
        try:
            await test(HostWatch(rest, reported), reported)
        finally:
            await rest.close()

    asyncio.run(run())


def test_readiness_taint_and_deletion_are_reported_but_heartbeats_are_not(cluster: Cluster, ghost: str) -> None:
    async def test(watch: HostWatch, reported: Reported) -> None:
        running = asyncio.create_task(watch.run())
        await asyncio.to_thread(create, cluster, ghost)
        await reported.until(False)
        await asyncio.to_thread(beat, cluster, ghost, True, 1)
        await reported.until(False, True)
        calls = reported.calls
        for beats in range(2, 7):
            await asyncio.to_thread(beat, cluster, ghost, True, beats)
        assert reported.calls == calls, "heartbeats of this node and of the cluster's own nodes cause no report"
        await asyncio.to_thread(
            cluster.kubectl, "taint", "node", ghost, "node.kubernetes.io/out-of-service=x:NoSchedule"
        )
        await reported.until(False, True, "out")
        await asyncio.to_thread(cluster.kubectl, "delete", "node", ghost)
        await reported.until(False, True, "out", None)
        running.cancel()

    watching(test, ghost)


@pytest.mark.parametrize("expired", [False, True], ids=["continues from its version", "its version has expired"])
def test_changes_that_an_interrupted_watch_has_missed_are_reported(cluster: Cluster, ghost: str, expired: bool) -> None:
    async def test(watch: HostWatch, reported: Reported) -> None:
        running = asyncio.create_task(watch.run())
        await asyncio.to_thread(create, cluster, ghost)
        await reported.until(False)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await asyncio.to_thread(cluster.kubectl, "delete", "node", ghost)
        if expired:
            watch._version = "1"
        running = asyncio.create_task(watch.run())
        await reported.until(False, None)
        running.cancel()

    watching(test, ghost)


def test_without_the_right_to_read_nodes_they_are_unknown_and_one_line_is_logged(
    cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    config = json.loads(cluster.kubectl("config", "view", "--raw", "--output=json"))
    token = cluster.kubectl("create", "token", "default", "--namespace", namespace).strip()
    config["users"] = [{"name": config["contexts"][0]["context"]["user"], "user": {"token": token}}]
    file = tmp_path / "kubeconfig"
    file.write_text(json.dumps(config))
    use(file, monkeypatch)
    monkeypatch.setattr("ddpjob.controller.host_watch._FORBIDDEN_RETRY", 0.1)

    def warnings() -> list[str]:
        return [r.getMessage() for r in caplog.records if "nodes are not watched" in r.getMessage()]

    async def test() -> None:
        rest, reported = await Rest.connect(), []
        running = asyncio.create_task(HostWatch(rest, lambda hosts, _: reported.append(hosts)).run())
        await asyncio.to_thread(processes.wait_for, "the warning", lambda: bool(warnings()), timeout=20)
        await asyncio.sleep(1)
        assert not running.done() and reported == []
        running.cancel()
        await rest.close()

    asyncio.run(test())
    (warning,) = warnings()
    assert "forbidden" in warning and "ClusterRole" in warning

"""The operator's process: watches by kopf, a queue of jobs, one replica that acts. `python -m ddpjob.controller`."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Coroutine
from typing import Any

import kopf
from prometheus_client import start_http_server

from ddpjob.controller import metrics
from ddpjob.controller.cluster import KubernetesCluster
from ddpjob.controller.coordinator import CoordinatorClient
from ddpjob.controller.election import LeadershipLost, Lease, act_while_elected
from ddpjob.controller.handlers import build_registry, kopf_settings
from ddpjob.controller.hosts import Hosts, HostWatch
from ddpjob.controller.news import NewsWatch
from ddpjob.controller.rest import Rest
from ddpjob.controller.settings import Settings, SettingsError
from ddpjob.engine.ports import JobKey
from ddpjob.engine.queue import DelayQueue
from ddpjob.engine.reconcile import reconcile
from ddpjob.objects.site import Site

log = logging.getLogger("ddpjob")


class Operator:
    """What one replica holds together."""

    def __init__(self, settings: Settings, cluster: KubernetesCluster) -> None:
        self.settings, self.cluster = settings, cluster
        self.queue: DelayQueue[JobKey] = DelayQueue()
        self.news = cluster.news = NewsWatch(self.queue.add)

    def wake(self, key: JobKey) -> None:
        self.cluster.changed(key)
        self.queue.add(key)

    def hosts_changed(self, hosts: Hosts | None, changed: frozenset[str]) -> None:
        """The jobs that have pods on nodes which have changed are looked at, at once."""
        self.cluster.hosts = hosts
        for key in self.cluster.jobs_on(changed):
            self.queue.add(key)

    async def one_pass(self, key: JobKey) -> float | None:
        began = time.perf_counter()
        outcome = "failed"
        try:
            delay = await reconcile(self.cluster, key)
            outcome = "done"
        finally:
            metrics.PASSES.labels(outcome).inc()
            metrics.PASS_SECONDS.observe(time.perf_counter() - began)
        return delay

    async def act(self) -> None:
        metrics.LEADING.set(1)
        log.info("this replica acts: %s", self.settings.identity)
        await self.queue.work(self.one_pass, self.settings.workers)

    async def watch(self, ready: asyncio.Event | None = None) -> None:
        settings = self.settings
        await kopf.operator(
            registry=build_registry(self.wake),
            settings=kopf_settings(settings),
            standalone=True,
            clusterwide=not settings.namespaces,
            namespaces=settings.namespaces,
            liveness_endpoint=f"http://0.0.0.0:{settings.health_port}/healthz" if settings.health_port else None,
            ready_flag=ready,
        )

    async def act_when_elected(self) -> None:
        """One replica of several acts. Losing the lease ends the process: whatever was under way is stopped with it."""
        settings = self.settings
        if not settings.lease_namespace:
            return await self.act()
        lease = Lease(self.cluster.rest, settings.lease_namespace, settings.lease_name, settings.identity)
        return await act_while_elected(lease, self.act)


async def _first_to_end(*work: Coroutine[Any, Any, None]) -> None:
    """Runs several things that never end; when one does, the others are cancelled and its error is raised."""
    tasks = [asyncio.create_task(w) for w in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run(settings: Settings) -> None:
    """Until SIGTERM or SIGINT, which kopf handles."""
    rest, coordinators = await Rest.connect(), CoordinatorClient()
    if settings.metrics_port:
        start_http_server(settings.metrics_port)
    operator = Operator(settings, KubernetesCluster(rest, coordinators, Site(operator_key=settings.key), settings.identity))
    try:
        await _first_to_end(operator.watch(), HostWatch(rest, operator.hosts_changed).run(), operator.act_when_elected())
    finally:
        await operator.news.close()
        await coordinators.close()
        await rest.close()


def main() -> int:
    try:
        settings = Settings.from_environment()
    except SettingsError as error:
        print(f"ddpjob-operator: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for chatty in ("kopf", "aiohttp.access"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        asyncio.run(run(settings))
    except LeadershipLost as lost:
        log.error("%s", lost)
        return 1
    return 0

"""Runs the operator's process: leader election, caches, a work queue of jobs, and probes.

Run it with `python -m ddpjob.controller`.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from aiohttp import web
from ddpjob_runtime.open_files import raise_open_files

from ddpjob.api.job_status import ConditionType
from ddpjob.controller import operator_metrics as metrics
from ddpjob.controller.caches import Caches, watches
from ddpjob.controller.handlers import follow_jobs
from ddpjob.controller.host_watch import Hosts
from ddpjob.controller.job_metrics import SERIES, JobAccounts
from ddpjob.controller.kube.election import Lease, act_while_elected
from ddpjob.controller.kube.rest import NoCredentials, Rest
from ddpjob.controller.kube.workqueue import DelayQueue, Turns
from ddpjob.controller.kubernetes_cluster import CREATIONS, KubernetesCluster
from ddpjob.controller.namespace_claims import NamespaceClaims
from ddpjob.controller.notifier import Notifier
from ddpjob.controller.operator_settings import Settings, SettingsError
from ddpjob.controller.operator_shards import Shards, shard_of
from ddpjob.controller.report_watch import ReportWatch
from ddpjob.controller.served_schema import REMEDY, ServedSchema
from ddpjob.core.world import Role
from ddpjob.engine.coordinator_client import CoordinatorClient
from ddpjob.engine.ports import JobKey, Unavailable
from ddpjob.engine.reconcile import reconcile
from ddpjob.objects.platform import Platform

log = logging.getLogger("ddpjob")

GARBAGE_OBJECTS = 50_000
"""Number of newly created objects after which Python searches them for reference cycles. Parsed
JSON contains many objects but no cycles. With Python's default of 700, the searches would double
the CPU time for reading a list of pods."""
OTHERS_SECONDS = 10.0
"""Number of seconds after which a job is reconciled again if a different operator seems to act on
it.
"""

INCOMPLETE_SECONDS = 1.0
"""Number of seconds after which a job is reconciled again if the objects in its namespace have not
been read completely.
"""
CONNECTIONS = 64
"""Number of connections that the operator opens for requests. Watches have additional connections.
"""


class Leader:
    """Acts as the leader of one shard, for one term.

    The leader follows the API server and reconciles the jobs in the shard's namespaces. No state is
    carried over to a later term.
    """

    def __init__(
        self, settings: Settings, rest: Rest, coordinators: CoordinatorClient, shard: int, schema: ServedSchema
    ) -> None:
        self.settings, self.shard, self.schema = settings, shard, schema
        creating = Turns(CREATIONS)
        # Each namespace gets a fair share of the workers, and `_rank` orders the jobs. While pods
        # wait to be created, the queue counts as crowded, so reconciles that only update a status
        # start less often.
        self.queue = DelayQueue[JobKey](group=lambda key: key.namespace, rank=self._rank, crowded=creating.wanted)
        self._reconciled = set[JobKey]()
        self.accounts = JobAccounts()
        watched, mine = settings.namespaces, self._is_in_shard
        changed, signals = self.accounts.changed, settings.node_health
        self.caches = Caches(rest, self.wake, self.hosts_changed, watched, mine, changed, signals)
        platform = Platform(
            operator_key=settings.key,
            operator_peer=settings.peer,
            metrics_peers=settings.metrics_peers,
            git_image=settings.code_image,
        )
        self.report_watch, self.notifier = ReportWatch(self.queue.add), Notifier(settings.receivers, self.queue.add)
        helpers = coordinators, platform, self.report_watch, self.notifier
        release = f"{settings.lease_namespace}/{settings.lease_name}"
        self.claims = NamespaceClaims(rest, release) if settings.lease_namespace else None
        acting = settings.classes, creating, settings.identity, self._is_sole
        self.cluster = KubernetesCluster(rest, self.caches, *helpers, *acting)

    def _is_in_shard(self, namespace: str) -> bool:
        return shard_of(namespace, self.settings.shards) == self.shard

    def _rank(self, key: JobKey) -> int:
        """Return the priority of a job in the work queue. The lowest number comes first.

        Jobs that are not running or lack pods come first. A running job that has all its pods comes
        after them until it has been reconciled once in this term. Finished jobs come last.
        """
        job = self.caches.job(key)
        if job is None:
            return 0
        if job.status.terminal:
            return 2
        if key in self._reconciled or not job.status.holds(ConditionType.RUNNING):
            return 0
        living = sum(not pod.ended and pod.role is not Role.COORDINATOR for pod in self.caches.pods(job))
        return int(living >= job.spec.pods)

    def wake(self, key: JobKey, urgent: bool) -> None:
        """Queue a job.

        The caches call this method whenever somebody other than this operator has changed the job
        or one of its objects.
        """
        self.queue.add(key, urgent=urgent)

    def hosts_changed(self, hosts: Hosts | None, changed: frozenset[str]) -> None:
        """Queue the jobs that have pods on one of the changed hosts, without a delay.

        The host watch calls this method.
        """
        for key in self.caches.jobs_on(changed):
            self.queue.add(key)

    async def reconcile_one(self, key: JobKey) -> float | None:
        """Reconcile one job, and return the number of seconds until its next reconcile.

        The duration of the reconcile is recorded as a metric.
        """
        began = time.perf_counter()
        known = self.caches.job(key) is not None
        (self._reconciled.add if known else self._reconciled.discard)(key)
        outcomes: list[str] = []
        try:
            # If the job is not in the caches, `reconcile` only discards the operator's data about
            # the job. This is correct even if a different replica acts in the job's namespace. If
            # the job does exist, its next event queues it again.
            pause = await self._find_pause(key) if known else 0.0
            if pause:
                outcomes.append("left")
                return pause
            return await reconcile(self.cluster, key, outcome=outcomes.append)
        except asyncio.CancelledError:
            # The term ended during the reconcile. This is not an error, because another replica
            # will reconcile the job.
            outcomes.append("left")
            raise
        finally:
            result = outcomes[0] if outcomes else "failed"
            metrics.RECONCILE_SECONDS.labels(result).observe(time.perf_counter() - began)

    async def _find_pause(self, key: JobKey) -> float:
        """Return for how many seconds this replica must not act on a job.

        The result is 0 if the replica may act now.
        """
        if not self.caches.complete_in(key.namespace) or not self.schema.fits:
            return INCOMPLETE_SECONDS
        ours = await self._is_ours(key)
        self.accounts.acts_on(key, acts=ours)
        return 0.0 if ours else OTHERS_SECONDS

    async def _is_ours(self, key: JobKey) -> bool:
        """Whether this operator is the one that acts in the job's namespace."""
        try:
            return self.claims is None or await self.claims.mine(key.namespace)
        except Unavailable as error:
            log.warning("namespace %s: the API server is unavailable: %s", key.namespace, error)
            return False

    def _is_sole(self, namespace: str) -> bool:
        """Whether this operator holds the namespace's Lease, which keeps other operators from
        acting there.
        """
        return self.claims is not None and self.claims.is_sole(namespace)

    async def _follow_by_kopf(self) -> None:
        """Run kopf until cancelled.

        If the API server was restored from a backup, stop kopf and start it again.
        """
        watched = replace(self.settings, namespaces=tuple(filter(None, self.caches.namespaces)))
        while True:
            following = asyncio.create_task(follow_jobs(watched, self.caches.seen_by_kopf))
            self.caches.restored.clear()
            restored = asyncio.create_task(self.caches.restored.wait())
            try:
                done, _ = await asyncio.wait([following, restored], return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (following, restored):
                    task.cancel()
                await asyncio.gather(following, restored, return_exceptions=True)
            if following in done:
                following.result()

    async def act(self) -> None:
        """Read all objects, then reconcile the jobs in the queue until cancelled."""
        log.info("%s acts for shard %s of %s", self.settings.identity, self.shard, self.settings.shards)
        metrics.LEADING.inc()
        SERIES.begin(self.accounts)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.caches.run())
                # If `namespaces` is empty here, none of the watched namespaces is in this shard.
                if self.caches.namespaces:
                    group.create_task(self._follow_by_kopf())
                await self.caches.answered()
                await self.queue.work(self.reconcile_one, self.settings.workers)
        finally:
            metrics.LEADING.dec()
            SERIES.end(self.accounts)
            await self.report_watch.close()
            await self.notifier.close()


class Operator:
    """One replica of the operator. It acts as the leader of each shard whose Lease it holds.

    A replica without a Lease requests only the Leases and the schema that the API server serves.
    """

    def __init__(
        self, settings: Settings, rest: Rest, leases: Sequence[Lease], coordinators: CoordinatorClient
    ) -> None:
        self.settings, self.rest, self.leases, self.coordinators = settings, rest, leases, coordinators
        self.schema = ServedSchema(rest)
        self.leaders: dict[int, Leader] = {}
        metrics.SHARDS.set(settings.shards)
        metrics.QUEUE_DEPTH.set_function(lambda: sum(leader.queue.depth() for leader in self._terms()))
        metrics.QUEUE_AGE.set_function(lambda: max((leader.queue.age() for leader in self._terms()), default=0.0))
        for state, answers in (("reachable", True), ("unreachable", False)):
            metrics.COORDINATORS.labels(state).set_function(functools.partial(self._coordinators, answers=answers))

    def _terms(self) -> list[Leader]:
        """Return the leaders of the current terms.

        The thread that serves Prometheus also calls this method.
        """
        return list(self.leaders.values())

    def _coordinators(self, *, answers: bool) -> int:
        return sum(leader.report_watch.count(answers=answers) for leader in self._terms())

    async def act(self, shard: int) -> None:
        """Act as the leader of a shard for one term.

        Each term starts without the state of earlier terms, because another replica may have acted
        in between.
        """
        leader = self.leaders[shard] = Leader(self.settings, self.rest, self.coordinators, shard, self.schema)
        try:
            await leader.act()
        finally:
            del self.leaders[shard]

    async def act_when_elected(self) -> None:
        """Act for each shard while this replica holds the shard's Lease.

        If there are no Leases, always act. The method ends only with an error. A replica whose
        release needs a newer CRD than the cluster has cannot act, so it leaves the Leases to
        replicas of the previous release.
        """
        looking = asyncio.create_task(self.schema.run())
        try:
            await self.schema.wait()
            if not self.leases:
                await self.act(0)
            async with asyncio.TaskGroup() as group:
                for shard, lease in enumerate(self.leases):
                    group.create_task(act_while_elected(lease, functools.partial(self.act, shard)))
        finally:
            looking.cancel()

    @property
    def ready(self) -> bool:
        """Whether this replica does its work.

        A leader is ready once it has read all objects. A replica that does not lead any shard is
        ready if it has read the Leases recently.
        """
        if not self.schema.fits:
            return False
        if self.leaders:
            return all(leader.caches.complete for leader in self.leaders.values())
        return bool(self.leases) and all(lease.read_lately for lease in self.leases)


@asynccontextmanager
async def serve_probes(operator: Operator, address: str, port: int) -> AsyncIterator[None]:
    """Serve `/healthz` and `/readyz` over HTTP.

    `/healthz` responds as long as the event loop runs. `/readyz` shows whether this replica does
    its work.
    """
    app = web.Application()

    async def healthz(request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def readyz(request: web.Request) -> web.Response:
        if operator.schema.missing:
            text = f"the DDPJob definition (CRD) in the cluster lacks fields (see the log); {REMEDY}"
            return web.Response(status=503, text=text)
        return (
            web.Response(text="ok")
            if operator.ready
            else web.Response(status=503, text="the operator has not yet read all objects that it watches")
        )

    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, address, port).start()
        yield
    finally:
        await runner.cleanup()


async def run(settings: Settings) -> None:
    """Run the operator until cancelled."""
    async with AsyncExitStack() as stack:
        watching = settings.shards * watches(len(settings.namespaces))
        rest, coordinators = await Rest.connect(CONNECTIONS + watching), CoordinatorClient()
        stack.push_async_callback(rest.close)
        stack.push_async_callback(coordinators.close)
        leases: Sequence[Lease] = ()
        if settings.lease_namespace:
            # Requests for Leases use separate connections, so that they never wait for a reconcile
            # to free a connection.
            alone = await Rest.connect(connections=2 * settings.shards)
            stack.push_async_callback(alone.close)
            place = settings.lease_namespace, settings.lease_name
            leases = Shards(alone, *place, settings.identity, settings.shards).leases
        operator = Operator(settings, rest, leases, coordinators)
        if settings.metrics_port:
            metrics.serve(settings.metrics_port, settings.address)
        if settings.health_port:
            await stack.enter_async_context(serve_probes(operator, settings.address, settings.health_port))
        await operator.act_when_elected()


async def run_until_signal(settings: Settings) -> None:
    """Run the operator until SIGTERM or SIGINT."""
    loop, running = asyncio.get_running_loop(), asyncio.create_task(run(settings))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, running.cancel)
    try:
        await running
    except asyncio.CancelledError:
        log.info("ended by a signal")


def main() -> int:
    """Run the operator, and return the exit code of the process.

    The code is 2 if settings are invalid or credentials are missing.
    """
    try:
        settings = Settings.from_environment()
    except SettingsError as error:
        print(f"ddpjob-operator: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for chatty in ("kopf", "aiohttp.access"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    # Hide kopf's warning that it cannot handle signals in a thread, because this process handles
    # signals itself.
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)
    # The operator holds a connection to the coordinator of each running job.
    raise_open_files()
    gc.freeze()
    gc.set_threshold(GARBAGE_OBJECTS)
    try:
        meter = metrics.TurnMeter()
        metrics.LONGEST_TURN.set_function(meter.longest)
        with asyncio.Runner(loop_factory=functools.partial(asyncio.SelectorEventLoop, meter)) as runner:
            runner.run(run_until_signal(settings))
    except NoCredentials as error:
        print(f"ddpjob-operator: {error}", file=sys.stderr)
        return 2
    return 0

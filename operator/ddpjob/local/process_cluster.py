"""Implements `Cluster` on this machine, with process groups as pods and the status in a file."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

from ddpjob_runtime import WORKER
from ddpjob_runtime.protocol import Report

from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import Json
from ddpjob.api.job_status import format_time, utc_now
from ddpjob.core.decision import Event
from ddpjob.core.world import LABEL_ATTEMPT, LABEL_ROLE, NODE_ROLES, Role, World
from ddpjob.engine.ports import Conflict, JobKey, NameTaken, Observation, Refused
from ddpjob.local import processes
from ddpjob.local.adapt_spec import LocalSpec
from ddpjob.local.environment import inherited
from ddpjob.local.local_platform import LocalPlatform, NoFreePorts, free_ports
from ddpjob.local.paths import RunFolder
from ddpjob.local.pod import UID_VARIABLE, Pod
from ddpjob.objects.platform import Platform
from ddpjob.objects.service import RUNTIME_FOLDER, runtime_name

log = logging.getLogger("ddpjob.local")

SPARE_SECONDS = 0.5
"""Delay in seconds before a lost pod is replaced if the job has spares. Starting a pod occupies a
CPU for seconds, and would slow down the group that restarts with the spare.
"""


@dataclass(frozen=True)
class TimedEvent:
    """An event and the time when it was recorded."""

    time: datetime
    event: Event


class ProcessCluster:
    """Implements `ddpjob.engine.ports.Cluster` for one job.

    It must only be used in the event loop's thread. `ports` is the result of `free_ports` for the
    first generation's coordinators.
    """

    def __init__(
        self,
        body: Json,
        local_spec: LocalSpec,
        folder: RunFolder,
        checkpoints: Path,
        ports: tuple[int, socket.socket],
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        self.body, self.local_spec, self.folder, self.clock = body, local_spec, folder, clock
        self.platform: Platform = LocalPlatform(
            operator_key=os.urandom(32),
            python=sys.executable,
            runtime_path=str(RUNTIME_FOLDER.parent),
            data_path=str(local_spec.data) if local_spec.data else None,
            code_path=str(local_spec.code) if local_spec.code else None,
            checkpoint_path=str(checkpoints),
            checkpoints_shared=True,
            torchrun_python=str(folder.torchrun_python),
        )
        if local_spec.code is not None:
            # Processes start in these folders before the code is fetched, so the folders must
            # exist.
            for needed in (local_spec.code, local_spec.working_dir):
                needed.mkdir(parents=True, exist_ok=True)
        # torchrun cannot execute worker.py directly, because an installed package's files may lack
        # execute permission.
        folder.torchrun_python.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, str(WORKER)])} "$@"\n')
        folder.torchrun_python.chmod(0o700)
        # This import takes 0.3 s, which would delay `ddpjob get`.
        from ddpjob.engine.coordinator_client import CoordinatorClient, target_of

        self.coordinators, self._target_of = CoordinatorClient(), target_of
        self.pods: dict[str, Pod] = {}
        self.events: list[TimedEvent] = []
        self.stalls: list[float] = []
        """Seconds from each break to the first step after it, as reported by the coordinators."""
        self.stopped_by = ""
        """The signal that suspended the job; empty if the job is not suspended, or if a user
        suspended it.
        """
        self.changed = asyncio.Event()
        self._objects: set[tuple[str, str]] = set()
        self._ports: dict[int, tuple[int, socket.socket]] = {0: ports}
        ranks = local_spec.spec.nodes * local_spec.spec.procs_per_node
        self._inherited = inherited(max(1, len(os.sched_getaffinity(0)) // ranks))

    # --- reading

    @property
    def job(self) -> DDPJob:
        """The job, with its spec adapted to this machine.

        Each generation has its own ports, because coordinators of two generations can run at the
        same time.
        """
        job = DDPJob.read(self.body)
        spec = self.local_spec.spec
        policy = replace(spec.run_policy, suspend=job.spec.run_policy.suspend)
        rendezvous = replace(spec.rendezvous, port=self._port(job.status.rendezvous.generation))
        return replace(job, spec=replace(spec, run_policy=policy, rendezvous=rendezvous, nodes=job.spec.nodes))

    def _port(self, generation: int) -> int:
        if generation not in self._ports:
            try:
                self._ports[generation] = free_ports()
            except NoFreePorts:
                # Use the ports of the previous generation. The new coordinator can listen on these
                # ports once the previous coordinator has ended.
                self._ports[generation] = self._ports[max(self._ports)]
        return self._ports[generation][0]

    async def observe(self, key: JobKey) -> Observation | None:
        job = self.job
        endpoint = job.status.rendezvous.endpoint
        report = await self.coordinators.report(self._target_of(job, self.platform, endpoint)) if endpoint else None
        self._note_stall(report)
        self.collect()
        files = runtime_name()
        world = World(
            pods=tuple(pod.view() for pod in self.pods.values()),
            has_service=("Service", job.name) in self._objects,
            has_budget=("PodDisruptionBudget", job.name) in self._objects,
            runtime=files if ("ConfigMap", files) in self._objects else "",
            runtime_offered=files,
            report=report,
            one_host=True,
        )
        return Observation(job, world)

    def _note_stall(self, report: Report | None) -> None:
        # If the script reports no steps, the coordinator measures only the time until the next
        # round runs. This time is not the length of a stall.
        seconds = report.recovery.last_seconds if report is not None and report.progress.get("step") else None
        if seconds is not None and seconds not in self.stalls:
            self.stalls.append(seconds)

    def collect(self) -> None:
        """Check which processes have ended, reap orphans, and remove deleted pods that have
        ended.
        """
        processes.reap_orphans(self.processes())
        now = self.clock()
        for pod in list(self.pods.values()):
            if pod.poll(now):
                self.changed.set()
            if pod.ended and pod.deleted_at is not None:
                del self.pods[pod.name]
                self.changed.set()

    def processes(self) -> list[subprocess.Popen[bytes]]:
        return [process for pod in self.pods.values() for process in pod.processes()]

    @property
    def idle(self) -> bool:
        """Whether none of the job's pods is running."""
        return all(pod.ended for pod in self.pods.values())

    # --- writing: called only by apply

    async def write_status(self, job: DDPJob, status: Json) -> DDPJob:
        if job.resource_version != self.body["metadata"]["resourceVersion"]:
            raise Conflict
        self._store({**self.body, "status": status})
        return self.job

    def _store(self, body: Json) -> None:
        version = str(int(body["metadata"]["resourceVersion"]) + 1)
        self.body = {**body, "metadata": {**body["metadata"], "resourceVersion": version}}

    async def create(self, job: DDPJob, manifest: Json) -> None:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        if kind == "Pod":
            self._create_pod(job, manifest)
        self._objects.add((kind, name))
        self.changed.set()

    def _create_pod(self, job: DDPJob, manifest: Json) -> None:
        name = manifest["metadata"]["name"]
        if name in self.pods:
            if self.pods[name].deleted_at is not None:
                raise NameTaken
            return
        environment = dict(self._inherited)
        index = manifest["metadata"]["labels"].get("ddpjob.io/index")
        gpus = self.local_spec.visible_gpus(int(index)) if index is not None else ""
        if gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpus
        devices = {self.local_spec.spec.gpu_resource: len(gpus.split(","))} if gpus else {}
        labels = manifest["metadata"]["labels"]
        replaces = labels[LABEL_ROLE] in NODE_ROLES and labels[LABEL_ATTEMPT] != "0"
        delay = SPARE_SECONDS if replaces and self.local_spec.spec.spares else 0.0
        try:
            self.pods[name] = Pod(
                manifest, self.folder, environment, self.local_spec.working_dir, self.clock(), delay, devices
            )
        except OSError as error:
            raise Refused(507, f"pod {name} cannot be started: {error}") from error

    async def delete_pod(self, job: DDPJob, name: str, uid: str, grace: int | None) -> None:
        pod = self.pods.get(name)
        if pod is None or pod.uid != uid:
            return
        self.changed.set()
        if pod.ended:
            del self.pods[name]
        elif grace == 0:
            self.force_delete(pod)
        elif pod.deleted_at is None:
            seconds = pod.grace if grace is None else grace
            pod.deleted_at = self.clock() + timedelta(seconds=seconds)
            pod.terminate()
            asyncio.get_running_loop().call_later(seconds, self._grace_is_over, pod)

    def _grace_is_over(self, pod: Pod) -> None:
        # The process ids of a pod that was force-deleted meanwhile may belong to other processes.
        if self.pods.get(pod.name) is pod and not pod.ended:
            pod.kill()
            self.changed.set()

    def force_delete(self, pod: Pod) -> None:
        """Remove a pod immediately, as `kubectl delete pod --force --grace-period=0` does."""
        pod.kill()
        del self.pods[pod.name]
        self.changed.set()

    async def delete(self, job: DDPJob, kind: str, name: str, uid: str) -> None:
        raise AssertionError(f"a single machine does not support gangs, queues or a time to live: {kind}")

    async def change_workload(
        self, job: DDPJob, name: str, uid: str, change: Callable[[Json, datetime], Json | None]
    ) -> None:
        raise AssertionError("a single machine has no queues")

    async def send_notification(self, job: DDPJob, id: str, receiver: str, body: Json) -> None:
        raise AssertionError("a single machine has no receivers")

    async def label_pod(self, job: DDPJob, name: str, uid: str, role: Role) -> None:
        pod = self.pods.get(name)
        if pod is not None and pod.uid == uid:
            pod.role = role

    async def notify(self, job: DDPJob, endpoint: str, verb: str, body: Json) -> None:
        if endpoint:
            await self.coordinators.notify(self._target_of(job, self.platform, endpoint), verb, body)

    async def record(self, job: DDPJob, event: Event) -> None:
        if event.reason == "Suspended" and self.stopped_by:
            event = Event(False, event.reason, f"stopped by {self.stopped_by}; pods stop, and checkpoints are kept")
        if event.once and any(earlier.event == event for earlier in self.events):
            return
        happened = TimedEvent(self.clock(), event)
        self.events.append(happened)
        line = {
            "time": format_time(happened.time),
            "warning": event.warning,
            "reason": event.reason,
            "message": event.message,
        }
        # A full disk does not stop training. The event is shown, but not written to the file.
        with suppress(OSError), self.folder.events.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    # --- the user's requests

    def suspend(self, wanted: bool) -> None:
        """Set spec.runPolicy.suspend, as `kubectl patch` would."""
        self._change({"runPolicy": {**self.body["spec"].get("runPolicy", {}), "suspend": wanted}})

    def scale(self, nodes: int) -> None:
        """Set spec.nodes, as `kubectl scale` would."""
        self._change({"nodes": nodes})

    def _change(self, fields: Json) -> None:
        meta = {**self.body["metadata"], "generation": self.body["metadata"]["generation"] + 1}
        self._store({**self.body, "metadata": meta, "spec": {**self.body["spec"], **fields}})
        self.changed.set()

    def kill_all(self) -> None:
        """Send SIGKILL to every pod."""
        for pod in self.pods.values():
            pod.kill()
        self.changed.set()

    async def close(self, others: Collection[int]) -> list[int]:
        """Kill all processes that the job has started, and return the ids of those that remain.

        `others` are this process's children that do not belong to the job.
        """
        self.kill_all()
        left = processes.end_all({UID_VARIABLE: self.body["metadata"]["uid"]})
        left += processes.end_children([*others, *left], self.processes())
        self.collect()
        await self.coordinators.close()
        for _, mark in self._ports.values():
            mark.close()
        return left

    def nodes(self) -> list[Pod]:
        """Return the pods of all slots, including spares."""
        return [pod for pod in self.pods.values() if pod.role in NODE_ROLES]

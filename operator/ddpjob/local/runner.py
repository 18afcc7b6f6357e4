"""Runs one job on this machine until it has ended: reconcile loop, signals, record and clean-up."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import Json
from ddpjob.api.job_status import ConditionType, JobStatus, format_time, utc_now
from ddpjob.core.status.messages import count
from ddpjob.engine.ports import JobKey
from ddpjob.engine.reconcile import reconcile
from ddpjob.local import processes, watchdog
from ddpjob.local.adapt_spec import LocalSpec, too_many_nodes
from ddpjob.local.paths import JobFolder, RunFolder, memory_folder
from ddpjob.local.pod import Pod
from ddpjob.local.process_cluster import ProcessCluster, TimedEvent
from ddpjob.local.record import refuse, requests, write_record

TICK = 0.25
"""Interval in seconds at which requests are handled and the display is updated."""
RECONCILE_SECONDS = 0.5
"""Maximum number of seconds between reconciles while the job runs. Frequent reconciles are cheap,
because the coordinator's report costs only one request on loopback.
"""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class ShownPod:
    """A pod as shown in the display."""

    name: str
    state: str
    log: Path


@dataclass(frozen=True)
class Shown:
    """The content of a display: the job, its pods, and the events since the run began."""

    job: DDPJob
    status: JobStatus
    pods: tuple[ShownPod, ...]
    events: tuple[TimedEvent, ...]
    now: datetime
    stalls: tuple[float, ...] = ()
    """Seconds from each break to the first step after it."""


class RunDisplay(Protocol):
    """Shows a run to the user."""

    def show(self, shown: Shown) -> None:
        """Update the display. Called several times a second."""

    def note(self, text: str) -> None:
        """Print a line that later updates do not overwrite."""

    def close(self) -> None:
        """Restore the terminal."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    shown: Shown
    interrupted: signal.Signals | None = None
    left: tuple[int, ...] = ()
    """Ids of processes that could not be killed."""


def new_body(manifest: Json, now: datetime) -> Json:
    """Return the object that an API server would store for a new job with this manifest."""
    meta = {"namespace": "default", **manifest["metadata"]}
    stored = {"uid": str(uuid.uuid4()), "resourceVersion": "1", "generation": 1, "creationTimestamp": format_time(now)}
    return {**manifest, "metadata": {**meta, **stored}}


def prepare(folder: JobFolder, *, fresh: bool, now: datetime, disposable: bool = False) -> RunFolder:
    """Create the folders of a new run.

    With `fresh`, the checkpoints of earlier runs are moved into the folder of the new run. With
    `disposable`, the checkpoints of the new run are deleted together with the job. If the
    checkpoint folder also contains checkpoints that are not disposable, all checkpoints in the
    folder are kept. Raises OSError.
    """
    name = now.astimezone().strftime("%Y%m%d-%H%M%S")
    run = folder.run(name)
    for number in range(2, 100):
        if not run.path.exists():
            break
        run = folder.run(f"{name}-{number}")
    run.pods.mkdir(parents=True)
    if fresh and folder.checkpoints.exists():
        _set_aside(folder.checkpoints, run.earlier)
        if folder.disposable.exists():
            run.disposable.touch()
    if folder.checkpoints.is_symlink() and not folder.checkpoints.exists():
        why = f"a link to {folder.checkpoints.readlink()}, which does not exist (is its disk mounted?)"
        raise FileNotFoundError(errno.ENOENT, why, str(folder.checkpoints))
    folder.checkpoints.mkdir(exist_ok=True)
    if not disposable:
        folder.disposable.unlink(missing_ok=True)
    elif not folder.has_checkpoints():
        folder.disposable.touch()
    shutil.rmtree(folder.requests, ignore_errors=True)
    # Create the folder for requests now. If a request with sudo created it, the folder would belong
    # to root, and this process could not remove any requests from it.
    folder.requests.mkdir(exist_ok=True)
    return run


def _set_aside(checkpoints: Path, earlier: Path) -> None:
    """Move the checkpoints to `earlier`.

    If the checkpoint folder is a link, for instance to a larger disk, both old and new checkpoints
    are kept on that disk.
    """
    if not checkpoints.is_symlink():
        checkpoints.rename(earlier)
        return
    real = checkpoints.resolve()
    earlier.symlink_to(real.rename(real.with_name(f"{real.name}-before-{earlier.parent.name}")))
    real.mkdir()


@contextmanager
def watched(uid: str) -> Iterator[None]:
    """Run the watchdog inside the `with` block.

    If this process ends without killing the job's processes, the watchdog kills them.
    """
    command = [sys.executable, "-I", "-S", str(Path(watchdog.__file__).resolve()), uid, str(memory_folder(uid))]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DDPJOB_")}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


class Runner:
    """One run of one job. `run()` returns once the job has ended and its processes are gone."""

    def __init__(
        self,
        body: Json,
        local_spec: LocalSpec,
        folder: JobFolder,
        run: RunFolder,
        ports: tuple[int, socket.socket],
        display: RunDisplay,
    ) -> None:
        self.folder, self.run_folder, self.display = folder, run, display
        self.cluster = ProcessCluster(body, local_spec, run, folder.checkpoints, ports)
        self.key = JobKey(body["metadata"]["namespace"], body["metadata"]["name"])
        self.interrupted: signal.Signals | None = None
        self.abandoned = False
        self._recorded: Json = {}
        self._unrecorded = False

    async def run(self) -> Outcome:
        """Run until the job has ended or a signal has stopped it.

        A job has ended if it is Complete or Failed, and all of its pods have ended.
        """
        loop = asyncio.get_running_loop()
        processes.become_subreaper()
        loop.add_signal_handler(signal.SIGCHLD, self.cluster.changed.set)
        for number in SIGNALS:
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup ignores SIGHUP, so the run outlives its terminal.
            loop.add_signal_handler(number, self._on_signal, number)
        left: list[int] = []
        with watched(self.cluster.body["metadata"]["uid"]):
            # Two kinds of children do not belong to the job: the watchdog, and children of a shell
            # that has replaced itself with this process (exec).
            others = processes.children()
            try:
                await self._reconcile_until_over()
            finally:
                left = await self.cluster.close(others)
                self._record()
        return Outcome(self._shown(), self.interrupted, tuple(left))

    async def _reconcile_until_over(self) -> None:
        clock = asyncio.get_running_loop().time
        due = clock()
        while not self._is_over():
            if self.cluster.changed.is_set() or clock() >= due:
                self.cluster.changed.clear()
                delay = await reconcile(self.cluster, self.key)
                due = clock() + min(RECONCILE_SECONDS, delay if delay is not None else RECONCILE_SECONDS)
            self._process_requests()
            self._record()
            self._display(lambda: self.display.show(self._shown()))
            await self._sleep(max(0.0, min(TICK, due - clock())))
        if self.interrupted is not None:
            # Pods may have ended since the last reconcile. Reconcile once more, so that the record
            # does not list them.
            await reconcile(self.cluster, self.key)

    async def _sleep(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.cluster.changed.wait()

    def _is_over(self) -> bool:
        self.cluster.collect()
        status = JobStatus.read(self.cluster.body.get("status") or {})
        ended = status.terminal or (self.interrupted is not None and status.holds(ConditionType.SUSPENDED))
        return self.abandoned or (ended and self.cluster.idle)

    # --- the user's requests

    def _on_signal(self, number: signal.Signals) -> None:
        """Suspend the job on the first signal, and kill its pods on the second.

        A suspended job's pods get their grace period to save a checkpoint.
        """
        if number is signal.SIGHUP and self.interrupted is not None:
            # This is not a second request: systemd sends SIGHUP right after SIGTERM at logout and
            # shutdown.
            return
        status = JobStatus.read(self.cluster.body.get("status") or {})
        if self.interrupted is not None or status.terminal:
            self.interrupted = self.interrupted or number
            self.abandoned = True
            self.cluster.kill_all()
            return
        self.interrupted = number
        self.cluster.stopped_by = number.name
        grace = max((pod.grace for pod in self.cluster.nodes()), default=0)
        self.cluster.suspend(True)
        self._note(f"{number.name}: the nodes save a checkpoint and exit within {grace} s; a second signal kills them")

    def _process_requests(self) -> None:
        for path, verb, subject in requests(self.folder):
            reason = ""
            if verb == "kill" and subject in self.cluster.pods:
                self._note(f"kill {subject}: SIGKILL, like kubectl delete pod --force")
                self.cluster.force_delete(self.cluster.pods[subject])
            elif verb in ("suspend", "resume", "scale") and self.interrupted is not None:
                reason = f"job {self.folder.name} is being stopped by {self.interrupted.name}"
            elif verb in ("suspend", "resume"):
                self.cluster.suspend(verb == "suspend")
            elif verb == "scale":
                reason = self._scale(int(subject))
            if reason:
                with suppress(OSError):
                    refuse(path, reason)
            path.unlink(missing_ok=True)

    def _scale(self, nodes: int) -> str:
        """Scale the job. Return the reason if the scaling is refused; empty if it is accepted."""
        refused = too_many_nodes(self.cluster.local_spec, nodes)
        self._note(f"scale to {count(nodes, 'node')}: {refused or 'spec.nodes has changed'}")
        if not refused:
            self.cluster.scale(nodes)
        return refused

    # --- display and record

    def _note(self, text: str) -> None:
        self._display(lambda: self.display.note(text))

    def _display(self, update: Callable[[], None]) -> None:
        """Update the display.

        An output error must not interrupt training or prevent a signal from stopping it. If the
        reader of the output has exited (`| head`), the job is suspended, as after Ctrl-C. If Ctrl-C
        has also stopped the reader (`| tee`), the output error does not count as a second signal.
        If the terminal was closed, SIGHUP has already been sent. If SIGHUP is ignored, or the disk
        is full, training continues without output.
        """
        try:
            update()
        except BrokenPipeError:
            if self.interrupted is None:
                self._on_signal(signal.SIGPIPE)
        except OSError:
            return

    def _shown(self) -> Shown:
        job = self.cluster.job
        pods = tuple(ShownPod(p.name, _state(p), p.logs()[0]) for p in self.cluster.pods.values())
        return Shown(job, job.status, pods, tuple(self.cluster.events), utc_now(), tuple(self.cluster.stalls))

    def _record(self) -> None:
        pods = [
            {
                "name": pod.name,
                "role": str(pod.role),
                "state": _state(pod),
                "created": format_time(pod.created),
                "logs": [str(log) for log in pod.logs()],
            }
            for pod in self.cluster.pods.values()
        ]
        local = {"run": self.run_folder.name, "folder": str(self.run_folder.path), "pods": pods}
        record = {**self.cluster.body, "local": {**local, "stallSeconds": self.cluster.stalls}}
        if record == self._recorded:
            return
        try:
            write_record(self.folder, record)
        except OSError as error:
            if not self._unrecorded:
                self._note(
                    f"{self.folder.status}: {error.strerror}; training continues, but other commands see the"
                    " previous status"
                )
            self._unrecorded = True
        else:
            self._recorded, self._unrecorded = record, False


def _state(pod: Pod) -> str:
    """Return the pod's state as kubectl shows it in the STATUS column."""
    view = pod.view()
    if pod.deleted_at is not None and not pod.ended:
        return "Terminating"
    if view.main.ended:
        return "Completed" if view.main.exit_code == 0 else f"Error ({view.main.exit_code})"
    return view.phase

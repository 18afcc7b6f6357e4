"""A pod on this machine. Each container is a process group, and the status looks like a
kubelet's.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import uuid
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ddpjob.api.job_spec import Json
from ddpjob.core.world import (
    COORDINATOR_CONTAINER,
    LABEL_ATTEMPT,
    LABEL_GENERATION,
    LABEL_INDEX,
    LABEL_ROLE,
    LABEL_UID,
    TRAINER_CONTAINER,
    ContainerView,
    PodView,
    Role,
)
from ddpjob.local import processes
from ddpjob.local.environment import ADDRESS, HOST, argument_vector, manifest_variables
from ddpjob.local.paths import RunFolder, memory_folder

SNAPSHOT_FOLDER = "DDPJOB_SNAPSHOT_FOLDER"
UID_VARIABLE, CONTAINER_VARIABLE = "DDPJOB_UID", "DDPJOB_CONTAINER"
_MESSAGE_BYTES, _LOG_TAIL_BYTES, _LOG_TAIL_LINES = 4096, 2048, 80
_CANNOT_START = 128
"""The exit code that container runtimes report for a command that cannot be executed."""


@dataclass(frozen=True)
class Started:
    """A container's main process and the files that it writes."""

    name: str
    process: subprocess.Popen[bytes] | None
    log: Path
    termination: Path
    marks: dict[str, str]
    since: datetime


class Pod:
    """A pod that starts its containers when it is constructed.

    `inherited` is the environment to which the manifest's variables are added. `delay` is the
    number of seconds after which a shell starts the containers' commands. If the shell cannot
    execute a command, the command's container ends with the shell's exit code. `devices` maps the
    name of a resource to the number of this machine's devices that the pod uses.

    Raises OSError if the containers' logs cannot be written.
    """

    def __init__(
        self,
        manifest: Json,
        folder: RunFolder,
        inherited: dict[str, str],
        working_dir: Path,
        now: datetime,
        delay: float = 0.0,
        devices: dict[str, int] | None = None,
    ) -> None:
        meta, labels = manifest["metadata"], manifest["metadata"]["labels"]
        self.name, self.uid = str(meta["name"]), str(uuid.uuid4())
        self.role = Role(labels[LABEL_ROLE])
        self._labels, self._folder, self._working_dir, self._delay = labels, folder, working_dir, delay
        self.created = now
        self.devices = devices or {}
        self.deleted_at: datetime | None = None
        self.grace = int(manifest["spec"].get("terminationGracePeriodSeconds", 30))
        self.views: dict[str, ContainerView] = {}
        self._started: list[Started] = []
        self._memory = memory_folder(str(labels[LABEL_UID])) / self.name
        manifest = {**manifest, "metadata": {**meta, "uid": self.uid}}
        for container in manifest["spec"]["containers"]:
            if container["name"] in (TRAINER_CONTAINER, COORDINATOR_CONTAINER):
                self._start(manifest, container, inherited, now)

    @property
    def index(self) -> int:
        return int(self._labels.get(LABEL_INDEX, 0))

    def _start(self, manifest: Json, container: Json, inherited: dict[str, str], now: datetime) -> None:
        name = str(container["name"])
        variables = manifest_variables(manifest, container)
        marks = {UID_VARIABLE: str(self._labels[LABEL_UID]), CONTAINER_VARIABLE: f"{self.name}/{name}"}
        termination = self._folder.termination(self.name, name)
        environment = {**inherited, **variables, **marks, "DDPJOB_TERMINATION_LOG": str(termination)}
        if SNAPSHOT_FOLDER in variables:
            self._memory.mkdir(parents=True, exist_ok=True)
            environment[SNAPSHOT_FOLDER] = str(self._memory)
        words = argument_vector(container, variables)
        if self._delay:
            words = ["sh", "-c", f'sleep {self._delay}; exec "$0" "$@"', *words]
        log = self._folder.log(self.name, name)
        process: subprocess.Popen[bytes] | None = None
        with log.open("ab") as output:
            try:
                process = subprocess.Popen(
                    words,
                    env=environment,
                    cwd=self._working_dir,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=processes.dying_with(os.getpid()),
                )
                self.views[name] = ContainerView(started=now)
            except (OSError, ValueError) as error:  # ValueError: a NUL character in a word or variable.
                message = f"{words[0]!r} in {self._working_dir}: {getattr(error, 'strerror', error)}"
                output.write(f"cannot start {message}\n".encode(errors="backslashreplace"))
                self.views[name] = ContainerView(
                    started=now, exit_code=_CANNOT_START, reason="StartError", message=message, finished=now
                )
        self._started.append(Started(name, process, log, termination, marks, now))

    # --- observation

    def poll(self, now: datetime) -> bool:
        """Return whether the main process of any container has ended since the last call.

        If a main process has ended, kill the other processes of its container.
        """
        changed = False
        for started in self._started:
            if started.process is None or self.views[started.name].ended or started.process.poll() is None:
                continue
            changed = True
            processes.end_all(started.marks)  # A container ends when its main process ends.
            code = started.process.returncode
            self.views[started.name] = ContainerView(
                started=started.since,
                exit_code=code if code >= 0 else 128 - code,
                reason="Completed" if code == 0 else "Error",
                message=_termination_message(started, failed=code != 0),
                finished=now,
            )
        if changed and self.ended:
            shutil.rmtree(self._memory, ignore_errors=True)
        return changed

    @property
    def ended(self) -> bool:
        """Whether all containers have ended."""
        return all(view.ended for view in self.views.values())

    def processes(self) -> list[subprocess.Popen[bytes]]:
        return [s.process for s in self._started if s.process is not None]

    def logs(self) -> list[Path]:
        return [s.log for s in self._started]

    def view(self) -> PodView:
        """Return the pod as the API would show it."""
        return PodView(
            name=self.name,
            uid=self.uid,
            role=self.role,
            index=self.index,
            attempt=int(self._labels.get(LABEL_ATTEMPT, 0)),
            generation=int(self._labels.get(LABEL_GENERATION, 0)),
            phase=self._phase(),
            host=HOST,
            address=ADDRESS,
            created=self.created,
            deleted_at=self.deleted_at,
            containers=dict(self.views),
            grace_seconds=self.grace,
            devices=self.devices,
        )

    def _phase(self) -> str:
        if not self.ended:
            return "Running"
        return "Succeeded" if all(view.exit_code == 0 for view in self.views.values()) else "Failed"

    # --- termination

    def terminate(self) -> None:
        """Send SIGTERM to the main process of each container, as the kubelet does."""
        for started in self._started:
            if started.process is not None and not self.views[started.name].ended:
                processes.send(started.process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to all processes of each container.

        These are the container's process group, all processes that have the container's marks in
        their environment, and those descendants of the main process that lack the marks.
        """
        for started in self._started:
            if started.process is None or self.views[started.name].ended:
                continue
            unmarked = processes.descendants(started.process.pid)
            processes.send_group(started.process.pid, signal.SIGKILL)
            processes.end_all(started.marks)
            processes.kill(unmarked)


def _termination_message(started: Started, *, failed: bool) -> str:
    """Return the content of the termination file.

    If a failed container has not written this file, return the end of its log
    (FallbackToLogsOnError).
    """
    try:
        written = started.termination.read_bytes()[:_MESSAGE_BYTES]
    except OSError:
        written = b""
    if written or not failed:
        return written.decode(errors="replace")
    try:
        with started.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-_LOG_TAIL_LINES:])
    except OSError as error:  # The job must not fail if the folder was deleted.
        return f"no log: {started.log}: {error.strerror}"

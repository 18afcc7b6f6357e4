"""The `ddpjob run` command, which runs the job in a manifest on this machine and prints
the result.
"""

from __future__ import annotations

import asyncio
import json
import platform
import socket
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import Json, WhenDeleted
from ddpjob.api.job_status import ConditionType, utc_now
from ddpjob.cli.display import open_display, recoveries, reported_accuracy, shortest, stall_line
from ddpjob.cli.output import abandon_output, printable
from ddpjob.client.manifests.manifest_sources import BadInput, read_job
from ddpjob.client.texts.run_record import with_commit
from ddpjob.core.status.messages import count
from ddpjob.core.status.shown_progress import duration
from ddpjob.local.adapt_spec import LocalSpec, Options, adapt_spec
from ddpjob.local.clone_code import CloneError, clone
from ddpjob.local.local_platform import NoFreePorts, free_ports
from ddpjob.local.paths import JobFolder, RunFolder, job_folder
from ddpjob.local.record import AlreadyRunning, held, write_atomically
from ddpjob.local.runner import Outcome, Runner, new_body, prepare

EXIT_COMPLETE, EXIT_FAILED, EXIT_BAD_INPUT = 0, 1, 2


@dataclass(frozen=True)
class Ready:
    """A job that has passed all checks and can be started on this machine."""

    body: Json
    local_spec: LocalSpec
    folder: JobFolder


def ready(file: str, name: str | None, options: Options) -> Ready:
    """Read a job's manifest, and run all checks that do not need the job's folder.

    Raises BadInput if the job cannot run.
    """
    if platform.system() != "Linux":
        raise BadInput(
            f"{platform.system()}: jobs run only on Linux, and on Windows in WSL 2; `ddpjob validate` and the commands "
            f"for a cluster also work here"
        )
    body = new_body(with_commit(read_job(file, name), again=True), utc_now())
    job = DDPJob.read(body)
    folder = job_folder(job.name)
    local_spec = adapt_spec(job, folder, options)
    if local_spec.problems:
        raise BadInput("\n".join(local_spec.problems))
    return Ready(body, local_spec, folder)


def run_command(file: str, name: str | None, data: Path | None, workdir: Path | None, *, fresh: bool) -> int:
    """Run a job on this machine, and return the exit code.

    The code is 0 if the job is Complete, 1 if the job is Failed, 2 if the input is invalid, and
    128+N if signal N ended the run.
    """
    with ExitStack() as holding:
        try:
            job = ready(file, name, Options(data=data, working_dir=workdir))
            run, ports = _claim(job, holding, fresh=fresh)
        except (BadInput, AlreadyRunning, NoFreePorts) as error:
            print(printable(str(error)), file=sys.stderr)
            return EXIT_BAD_INPUT
        return _run(job, run, ports)


def _claim(job: Ready, holding: ExitStack, *, fresh: bool) -> tuple[RunFolder, tuple[int, socket.socket]]:
    """Lock the job's folder, reserve ports, and create the folder of a new run.

    The lock and the ports are held until `holding` is closed. Raises AlreadyRunning, BadInput or
    NoFreePorts.
    """
    try:
        job.folder.path.mkdir(parents=True, exist_ok=True)
        holding.enter_context(held(job.folder))
        storage = DDPJob.read(job.body).spec.storage
        if fresh and storage.url:
            raise BadInput(
                f"--fresh: the job would still resume from copies of its checkpoints in {storage.url} "
                "(spec.storage.checkpoints.url); choose a different metadata.name, or remove the job's folder there "
                f"and {shortest(job.folder.checkpoints)} on this machine"
            )
        # Reserve the ports before moving existing checkpoints aside. If no ports are free, the run
        # cannot start, and the checkpoints must stay in place.
        ports = free_ports()
        holding.callback(ports[1].close)
        code, to = job.local_spec.spec.code, job.local_spec.code
        if code is not None and code.git is not None and to is not None:
            clone(code.git, to)
        template = storage.claim_template
        disposable = template is not None and template.when_deleted is WhenDeleted.DELETE
        run = prepare(job.folder, fresh=fresh, now=utc_now(), disposable=disposable)
        write_atomically(run.manifest, json.dumps(job.body, indent=1))
    except CloneError as error:
        raise BadInput(str(error)) from error
    except OSError as error:
        at = error.filename or job.folder.path
        raise BadInput(f"{at}: {error.strerror}; set DDPJOB_RUNS to a different folder for runs") from error
    return run, ports


def _run(job: Ready, run: RunFolder, ports: tuple[int, socket.socket]) -> int:
    for warning in job.local_spec.warnings:
        print(printable(f"note: {warning}"), file=sys.stderr)
    resumes = job.folder.is_resumable()
    print(f"job {job.folder.name}: logs and status in {shortest(run.path)}")
    if resumes:
        print(f"resumes from the checkpoints in {shortest(job.folder.checkpoints)} (--fresh starts from scratch)")
    sys.stdout.flush()
    display = open_display()
    try:
        outcome = asyncio.run(Runner(job.body, job.local_spec, job.folder, run, ports, display).run())
    finally:
        with suppress(OSError):
            display.close()
    try:
        _print_result(job, run, outcome)
        sys.stdout.flush()
    except OSError:
        abandon_output()
    return _exit_code(outcome)


def _exit_code(outcome: Outcome) -> int:
    status = outcome.shown.status
    if status.holds(ConditionType.COMPLETE):
        return EXIT_COMPLETE
    return 128 + outcome.interrupted if outcome.interrupted and not status.terminal else EXIT_FAILED


def _print_result(job: Ready, run: RunFolder, outcome: Outcome) -> None:
    status = outcome.shown.status
    took = (status.completion_time or outcome.shown.now) - (outcome.shown.job.created or outcome.shown.now)
    state = str(status.phase)
    if outcome.interrupted is not None and not status.terminal:
        state = f"Interrupted by {outcome.interrupted.name}"
    lines = [("State", state)]
    condition = status.condition(ConditionType.FAILED)
    if condition is not None and condition.status:
        lines.append(("Reason", f"{condition.reason}: {condition.message}"))
    lines.append(("Time", duration(took.total_seconds())))
    lines += [("Progress", status.progress["display"])] if "display" in status.progress else []
    accuracy = reported_accuracy(status)
    lines += [("Accuracy", f"{accuracy:.2%}")] if accuracy is not None else []
    counts, allowed = status.restarts, outcome.shown.job.spec.recovery.max_restarts
    others = f", and {count(counts.uncounted, 'other restart')}" if counts.uncounted else ""
    lines.append(("Restarts", f"{count(counts.counted, 'failure')} (budget {allowed}){others}"))
    lines += [("", line) for line in (*recoveries(status), *map(stall_line, outcome.shown.stalls))]
    lines.append(("Logs", shortest(run.pods)))
    if job.folder.is_resumable():
        lines.append(("Checkpoints", shortest(job.folder.checkpoints)))
        if not status.terminal:
            lines.append(("Next", "run the same command again to resume from these checkpoints"))
    for label, text in lines:
        print(f"{label + ':' if label else '':<13}" + printable(text).replace("\n", "\n    "))
    if outcome.left:
        print(f"processes that could not be killed: {', '.join(map(str, outcome.left))}", file=sys.stderr)

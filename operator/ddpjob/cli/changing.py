"""Commands that change, restart, stop or delete jobs."""

from __future__ import annotations

import time
from contextlib import suppress

import click

from ddpjob.cli.places import with_backend
from ddpjob.cli.root import bare, command_of_job, complete_job, print_note, root, say
from ddpjob.client.backends.backend import Backend, Mistake
from ddpjob.client.backends.process_backend import ProcessBackend
from ddpjob.client.rerun_jobs import checkpoints_that_stay


@command_of_job
@click.argument("nodes", type=click.IntRange(1))
@with_backend
def scale(backend: Backend, job: str, nodes: int) -> None:
    """Change a job's number of nodes.

    The job's group restarts from the last checkpoint with the new number of nodes.

    \b
    Example: ddpjob scale first 4
    """
    from ddpjob.client.restart_jobs import change

    change(backend, job, {"nodes": nodes})
    done = "scaled" if _is_acted_on(backend, job) else "not yet scaled"
    say(f"ddpjob {job} {done} to {nodes} {'node' if nodes == 1 else 'nodes'}", backend)


ACT_SECONDS = 5.0
"""Maximum number of seconds that a command waits for an operator to act on a change. A working
operator acts within a fraction of a second."""


def _is_acted_on(backend: Backend, job: str) -> bool:
    """Return whether an operator acts on the job's latest spec within ACT_SECONDS.

    Print a note if none does.
    """
    end = time.monotonic() + ACT_SECONDS
    while True:
        try:
            body = backend.job(job)
        except Mistake:
            # The API server has accepted the change. The job was deleted afterwards, or the user is
            # not permitted to read it.
            return True
        wanted, seen = body["metadata"].get("generation"), (body.get("status") or {}).get("observedGeneration")
        if wanted is None or (isinstance(seen, int) and seen >= wanted):
            return True
        if time.monotonic() > end:
            print_note(
                f"no operator has acted on {job} within {ACT_SECONDS:.0f} s; run `ddpjob doctor` to check the operator"
            )
            return False
        time.sleep(0.1)


def _suspend(backend: Backend, job: str, wanted: bool) -> None:
    from ddpjob.client.restart_jobs import change

    change(backend, job, {"runPolicy": {"suspend": wanted}})


@command_of_job
@with_backend
def suspend(backend: Backend, job: str) -> None:
    """Suspend a job. Its pods save a checkpoint and stop.

    \b
    Example: ddpjob suspend first
    """
    _suspend(backend, job, True)
    done = "suspended" if _is_acted_on(backend, job) else "not yet suspended"
    say(f"ddpjob {job} {done}; run `ddpjob resume {job}` to continue it", backend)


@command_of_job
@with_backend
def resume(backend: Backend, job: str) -> None:
    """Continue a suspended job from its checkpoint.

    \b
    Example: ddpjob resume first
    """
    _suspend(backend, job, False)
    done = "resumed" if _is_acted_on(backend, job) else "not yet resumed"
    say(f"ddpjob {job} {done}", backend)


@command_of_job
@click.option(
    "--timeout", type=click.IntRange(1), default=600, show_default=True, help="Seconds to wait for the pods to stop."
)
@with_backend
def restart(backend: Backend, job: str, timeout: int) -> None:
    """Replace all pods of a job.

    The command suspends the job, waits until its pods have stopped, and resumes the job. This
    restart does not count against the job's budget.

    \b
    Example: ddpjob restart first
    """
    from ddpjob.client.restart_jobs import restart as replace_pods

    replace_pods(backend, job, timeout)
    say(f"ddpjob {job} restarted", backend)


@command_of_job
@click.option(
    "--fresh", is_flag=True, help="Start from scratch. The old checkpoints are kept, unless `delete` would delete them."
)
@with_backend
def rerun(backend: Backend, job: str, fresh: bool) -> None:
    """Start a finished job again, with the same manifest.

    The job resumes from its last checkpoint. On this machine, it runs in the background, as with
    `ddpjob submit`. On a cluster, the job is deleted and created again, but its checkpoints are
    kept. With --fresh, the job gets a new checkpoint folder. If the checkpoints would be deleted
    with the job (see `delete`), --fresh is required.

    \b
    Example: ddpjob rerun first
    """
    from ddpjob.client.rerun_jobs import rerun as start_again

    say(f"ddpjob {start_again(backend, job, fresh=fresh)}", backend)


@root.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...", shell_complete=complete_job, callback=bare)
@with_backend
def delete(backend: Backend, jobs: tuple[str, ...]) -> None:
    """Delete jobs and their pods.

    If one of the jobs does not exist, nothing is deleted. Checkpoints on volumes are kept, unless
    storage.checkpoints.claimTemplate.whenDeleted is Delete. The same rule applies to checkpoints on
    this machine: those in RUNS/JOB/checkpoints and those that --fresh has moved.

    \b
    Example: ddpjob delete first second
    """
    names = list(dict.fromkeys(jobs))
    bodies = {}
    for job in names:
        # A single job is deleted even if it cannot be read.
        with suppress(*((Mistake,) if len(names) == 1 else ())):
            bodies[job] = backend.job(job)
    for job in names:
        backend.delete(job)
        if isinstance(backend, ProcessBackend):
            where = f"{job}/checkpoints" if backend.resumes(job) else ""
        else:
            where = checkpoints_that_stay(bodies.get(job, {}))
        kept = f"; the next run with this name resumes from {where}, which is kept" if where else ""
        say(f"ddpjob {job} deleted{kept}", backend)


@root.command()
@click.argument("pod", callback=bare)
@with_backend
def kill(backend: Backend, pod: str) -> None:
    """Kill a pod to see the job recover.

    The command has the same effect as `kubectl delete pod --force --grace-period=0`.

    \b
    Example: ddpjob kill first-0-0
    """
    backend.kill(pod)
    say(f"pod {pod} killed", backend)


@command_of_job
@click.option("--now", is_flag=True, help="Kill the pods immediately, before they can save a checkpoint.")
def stop(job: str, now: bool) -> None:
    """Stop a run on this machine, with all its processes.

    \b
    Example: ddpjob stop digits
    """
    was_running = ProcessBackend().stop(job, now=now)
    click.echo(f"{job}: stopped" if was_running else f"{job}: not running")

"""Commands that show jobs without changing them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ddpjob.api.job_spec import Json
from ddpjob.api.job_status import utc_now
from ddpjob.api.near_misses import seconds
from ddpjob.cli.output import STATE_COLOURS, PathTemplate, document, format_rows, make_list, printable
from ddpjob.cli.places import EXIT_MISTAKE, EXIT_NEGATIVE, Place, in_place, with_backend
from ddpjob.cli.root import bare, command_of_job, complete_job, print_line, print_note, print_painted, root
from ddpjob.cli.waiting import wait_for
from ddpjob.client.backends.backend import Backend, EndedLogs, LogOptions, Mistake, NoSuchJob
from ddpjob.client.texts import job_text
from ddpjob.client.texts.metric_series import AXES


class _Output(click.Choice[str]):
    """The type of the `--output` option of `get`.

    A value is one of the choices, or `jsonpath=` followed by a template.
    """

    def __init__(self) -> None:
        super().__init__(["table", "wide", "name", "json", "yaml", "jsonpath=TEMPLATE"])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        kind, given, template = str(value).partition("=")
        if kind != "jsonpath":
            return super().convert(value, param, ctx)
        if not given:
            self.fail("write jsonpath='{.status.phase}'", param, ctx)
        try:
            return PathTemplate(template)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@root.command()
@click.argument("job", required=False, shell_complete=complete_job, callback=bare)
@click.option("-o", "--output", type=_Output(), default="table")
@click.option("-w", "--watch", is_flag=True, help="Print a line for each change, until Ctrl-C.")
@click.option("-A", "--all-namespaces", "everywhere", is_flag=True, help="List jobs in all namespaces of the cluster.")
@in_place
def get(place: Place, job: str | None, output: str | PathTemplate, watch: bool, everywhere: bool) -> None:
    """List jobs, the newest last, or print one job.

    \b
    Example: ddpjob get -w
             ddpjob get first -o yaml
             ddpjob get first -o jsonpath='{.status.phase}'
    """
    if everywhere and job is not None:
        raise click.UsageError("-A lists the jobs in all namespaces; for a single job, specify its namespace with -n")
    backend = place.backend(everywhere=everywhere)
    backend.whole = output in ("json", "yaml") or isinstance(output, PathTemplate)
    bodies = [backend.job(job)] if job is not None else backend.jobs()
    for note in backend.notes:
        print_note(note)
    if watch:
        _watch(backend, job, output, everywhere=everywhere)
    elif isinstance(output, PathTemplate) or output in ("json", "yaml"):
        click.echo(_format_body(bodies[0] if job is not None else make_list(bodies), output), nl=False)
    elif output == "name":
        for body in bodies:
            click.echo(_format_body(body, output), nl=False)
    elif not bodies:
        print_note(f"no jobs in {backend.where}")
    else:
        for line in format_rows(bodies, utc_now(), wide=output == "wide", namespaces=everywhere):
            print_painted(line)
        for warning in job_text.warnings(bodies):
            click.secho(printable(warning), err=True, fg="yellow")


def _format_body(body: Json, output: str | PathTemplate) -> str:
    """Format a job or a list of jobs in any output format except the table."""
    if isinstance(output, PathTemplate):
        return printable(output.text(body))
    return f"ddpjob.ddpjob.io/{body['metadata']['name']}\n" if output == "name" else document(body, output)


def _watch(backend: Backend, job: str | None, output: str | PathTemplate, *, everywhere: bool) -> None:
    widths: list[int] = []
    for body, gone in backend.changes(job):
        if output in ("table", "wide"):
            first, wide = not widths, output == "wide"
            lines = format_rows([body], utc_now(), wide=wide, namespaces=everywhere, widths=widths)
            for line in lines if first else lines[1:]:
                print_painted(line + ("   (deleted)" if gone and line is lines[-1] else ""))
        else:
            before = "---\n" if output == "yaml" else ""
            click.echo(before + _format_body(body, output), nl=isinstance(output, PathTemplate))
        sys.stdout.flush()


@root.command()
@click.argument("job", required=False, shell_complete=complete_job, callback=bare)
@click.option(
    "--once", is_flag=True, help="Print the table once. This is the default when the output is not a terminal."
)
@click.option("--interval", type=click.FloatRange(0.2), default=2.0, show_default=True, metavar="SECONDS",
              help="Time between refreshes.")  # fmt: skip
@with_backend
def top(backend: Backend, job: str | None, once: bool, interval: float) -> None:
    """Watch one job or all jobs on a live screen.

    With JOB, the screen shows the job's progress, loss, samples/s, ranks, and restarts with their
    causes, until the job ends. Without JOB, it lists all jobs, running jobs first. Keys move the
    cursor, find or open a job, and show finished jobs. The curves only contain steps since the
    screen was opened. To draw earlier steps too, use `ddpjob plot`.

    \b
    Example: ddpjob top first
    """
    from ddpjob.cli.top import show

    if job is not None:
        backend.job(job)
    show(backend, job, once=once, seconds=interval)


@root.command()
@click.option("-A", "--all-namespaces", "everywhere", is_flag=True, help="Show jobs in all namespaces of the cluster.")
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8300,
    show_default=True,
    help="Port to listen on; 0 chooses a free port.",
)
@click.argument("folder", type=click.Path(path_type=Path), metavar="[FOLDER]", required=False)
@in_place
def dashboard(place: Place, everywhere: bool, host: str, port: int, folder: Path | None) -> int:
    """Serve a dashboard for the browser until Ctrl-C.

    The dashboard shows all jobs live, each with its restarts, curves, pods, events and logs. It is
    read-only and uses your rights. The printed address contains a token for this session. Anyone
    with this address can see what you can see. The connection is not encrypted, so open the
    dashboard from another machine through `ssh -L 8300:127.0.0.1:8300`.

    With FOLDER, the dashboard shows deleted jobs, as `ddpjob show` does. FOLDER is a checkpoint
    folder, or a folder that contains several checkpoint folders.

    \b
    Example: ddpjob dashboard
             ddpjob dashboard -A --port 0
             ddpjob dashboard /mnt/checkpoints
    """
    from ddpjob.cli.dashboard_command import serve_dashboard

    if folder is not None:
        from ddpjob.client.backends.past_jobs import PastJobs

        return serve_dashboard(PastJobs(folder), host, port)
    return serve_dashboard(place.backend(everywhere=everywhere), host, port)


@root.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...", shell_complete=complete_job, callback=bare)
@click.option("-o", "--output", type=Path, metavar="FILE", help="Write an image file (.png, .svg or .pdf) instead.")
@click.option("--by", type=click.Choice(AXES), help="Horizontal axis. Default for several jobs: step.")
@with_backend
def plot(backend: Backend, jobs: tuple[str, ...], output: Path | None, by: str | None) -> None:
    """Draw the curves of a job across its restarts, or of several jobs in one chart.

    The numbers come from run/metrics.jsonl in the checkpoint folder. The built-in trainer writes
    this file, and so does ddpjob_report.report if it is called with a `step`. On this machine, the
    curves can be drawn at any time. On a cluster, one of the job's pods must be running. If the
    file is larger than 8 MiB, only its end is drawn, and a note says so. To write an image file,
    install the `trainer` extra on this machine.

    \b
    Example: ddpjob plot first
             ddpjob plot first -o first.png
             ddpjob plot first second --by epoch
    """
    from ddpjob.cli.terminal_curves import CUT, MOST_JOBS, check_picture, curves, draw, is_cut, overlay

    names = list(dict.fromkeys(jobs))
    if len(names) > MOST_JOBS:
        raise click.UsageError(
            f"{len(names)} jobs: at most {MOST_JOBS} can be drawn in different colors; specify fewer jobs"
        )
    if output is not None:
        check_picture(output)
    for job in names:
        backend.job(job)
    texts = [(job, backend.metrics(job)) for job in names]
    by = by or ("step" if len(names) > 1 else None)
    if output is not None:
        draw(texts, output, by)
        click.echo(f"wrote {output}")
    elif by is None:
        for line in curves(texts[0][1], names[0]):
            print_line(line)
        return
    else:
        for line in overlay(texts, by):
            click.echo(line)
    for job, text in texts:
        if is_cut(text):
            print_note(f"{job}: {CUT}" if len(names) > 1 else CUT)


@root.command()
@click.argument("folder", type=click.Path(path_type=Path), metavar="FOLDER")
def show(folder: Path) -> None:
    """Show the records that a deleted job left in its checkpoint folder.

    FOLDER is the job's folder in storage.checkpoints, or the folder that `ddpjob run` created for
    the job. Its file .ddpjob-rounds.jsonl records the job's rounds, its restarts with causes and
    tracebacks, its last progress and its result. The curves come from run/metrics.jsonl.

    \b
    Example: ddpjob show /mnt/checkpoints/first
             ddpjob show runs/digits
    """
    from ddpjob.cli.terminal_curves import curves
    from ddpjob.client.backends.left_behind import describe_left_behind, read_left_behind

    found = read_left_behind(folder)
    for line in describe_left_behind(found):
        print_line(line)
    if found.metrics:
        print_line("")
        try:
            for line in curves(found.metrics, found.name):
                print_line(line)
        # The error's own message advises the user to wait. The job may have been deleted, so print
        # a different message.
        except Mistake:
            print_line(f"{found.name}: its metrics contain no step")


@command_of_job
@with_backend
def describe(backend: Backend, job: str) -> None:
    """Show a job on one screen.

    The screen shows what the job is doing or waiting for. It also shows the job's conditions,
    slots, pods, restarts and events.

    \b
    Example: ddpjob describe first
    """
    from ddpjob.client.job_client import if_allowed

    body = backend.job(job)
    faults = list[str]()
    pods, events = if_allowed(backend.pods, job, faults), if_allowed(backend.events, job, faults)
    for line in job_text.describe(body, pods, events, utc_now()):
        print_painted(line)
    for fault in faults:
        print_note(fault)


@command_of_job
@with_backend
def why(backend: Backend, job: str) -> int:
    """Explain why a job is waiting or has failed, and what to do.

    \b
    Exit code: 1 if the job has failed, else 0.
    Example: ddpjob why first
    """
    from ddpjob.client.job_client import if_allowed

    body = backend.job(job)
    faults = list[str]()
    colour = STATE_COLOURS.get(job_text.phase(body), "")
    for number, line in enumerate(job_text.why(body, if_allowed(backend.pods, job, faults), utc_now())):
        print_painted(line, "" if number else colour)
    for fault in faults:
        print_note(fault)
    return EXIT_NEGATIVE if job_text.phase(body) == "Failed" else 0


@root.command()
@click.argument("job", metavar="JOB|POD", shell_complete=complete_job, callback=bare)
@click.option(
    "-f",
    "--follow",
    is_flag=True,
    help="Keep printing until the job ends, including replacement pods. With a POD, stop when that pod ends.",
)
@click.option(
    "--index", type=click.IntRange(0), multiple=True, help="Only pods of this slot (the first number in a pod's name)."
)
@click.option(
    "--rank",
    "rank",
    type=click.IntRange(0),
    multiple=True,
    help="Only the pod that has this global rank now. With -f, pods that take over the rank are included. If the pod "
    "has several ranks, lines marked with a different rank are omitted. To mark every line with its rank, set "
    'spec.torchrunArgs: ["--tee=3"].',
)
@click.option("--ended", is_flag=True, help="List the terminated pods whose logs can be printed.")
@click.option("--coordinator", is_flag=True, help="Include the coordinator's pods.")
@click.option("--previous", is_flag=True, help="Print the log from before the container's last restart by the kubelet.")
@click.option("--since", metavar="5m", help="Only lines newer than this age, such as 30s, 5m or 2h.")
@click.option(
    "--tail",
    type=click.IntRange(0),
    help="Only the last lines of each log. With -f, the logs of pods that start later are printed in full.",
)
@click.option(
    "--prefix/--no-prefix",
    default=None,
    help="Start each line with INDEX-ATTEMPT and the ranks. This is the default for a whole job.",
)
@in_place
def logs(
    place: Place, job: str, follow: bool, index: tuple[int, ...], rank: tuple[int, ...], coordinator: bool,
    ended: bool, previous: bool, since: str | None, tail: int | None, prefix: bool | None,
) -> int:  # fmt: skip
    """Print the logs of a job's pods, or of one pod.

    For a whole job, each line starts with its pod and the pod's current ranks, such as [1-0 rank 1]
    or [1-0 ranks 8-15]. Only the last state of a progress bar is printed. The end of a deleted
    pod's log can be printed if the job keeps it in storage.checkpoints (runPolicy.logsKept).

    \b
    Example: ddpjob logs first -f
             ddpjob logs first --rank 0 --tail 100
             ddpjob logs first-1-0
             ddpjob logs first --ended
    """
    from ddpjob.client.logs.log_follower import Chosen, LogFollower, last_state

    length = None if since is None else int(since) if since.isdigit() else seconds(since)
    if since is not None and not length:
        raise click.UsageError(f"--since {since}: write a duration, such as 30s, 5m or 2h")
    if follow and previous:
        raise click.UsageError("--previous: the log of a terminated container does not grow; remove --follow")
    backend, options = place.backend(), LogOptions(follow=follow, tail=tail, since=length, previous=previous)
    body, pod, kept = _job_or_pod(backend, job)
    name = body["metadata"]["name"]
    if ended:
        return _list_ended(backend, name)
    if pod and index:
        raise click.UsageError(f"{job} is a pod; --index chooses pods of a job: ddpjob logs {name} --index ...")
    if kept is not None and rank:
        raise click.UsageError(f"--rank: pod {pod} is gone, and its kept log does not show its ranks; remove --rank")
    follower = LogFollower(backend, body, options, Chosen(pod, index, rank, coordinator, kept))
    printed = prefix if prefix is not None else not pod
    for line in follower.lines():
        ranks, by = line.ranks, line.rank
        words = f" rank {by}" if by is not None else f" ranks {ranks[0]}-{ranks[-1]}" if ranks else ""
        mark = f"[{line.pod.name.removeprefix(name + '-')}{words}] ".encode() if printed else b""
        click.echo(mark + last_state(line.text) if printed else line.text)
    for note in follower.notes:
        print_note(note)
    if nothing := follower.why_nothing():
        print_note(nothing)
        held = list(follower.ranks.values())
        missing = rank and held and not any(number in ranks for ranks in held for number in rank)
        if missing or follower.missing_slots():
            return EXIT_MISTAKE
    return EXIT_NEGATIVE if follower.notes and not follower.seen else 0


def _list_ended(backend: Backend, job: str) -> int:
    """Print the name, state and message of each of the job's terminated pods.

    Pods of older attempts come first. Return the command's exit code.
    """
    pods = backend.pods(job)
    left, fault = [pod for pod in pods if pod.ended], ""
    try:
        left += backend.kept_logs(job).pods({pod.name for pod in pods})
    except Mistake as mistake:
        if not left:
            raise
        fault = str(mistake)
    for pod in left:
        print_line(f"{pod.name}  {pod.state}  {pod.message}".rstrip())
    if fault:
        print_note(fault)
    if not left:
        needs = "a writable spec.storage.checkpoints, spec.runPolicy.logsKept above 0, and no spec.command"
        print_note(f"{job}: no logs of terminated pods are kept; to keep them, the job needs {needs}")
    return 0 if left else EXIT_NEGATIVE


def _job_or_pod(backend: Backend, name: str) -> tuple[Json, str, EndedLogs | None]:
    """Return the job to which `name` belongs, the name of the pod, and the kept logs.

    If `name` is the name of a job, the name of the pod is empty. The kept logs are None unless the
    pod is gone.
    """
    try:
        return backend.job(name), "", None
    except NoSuchJob as missing:
        why = missing
    try:
        jobs = backend.jobs()
    except Mistake as mistake:
        # The user may have mistyped the name of a job, so report that there is no such job.
        if mistake.denied:
            raise why from mistake
        raise
    for body in jobs:
        job = body["metadata"]["name"]
        if name.startswith(f"{job}-"):
            pods = [pod.name for pod in backend.pods(job)]
            if name in pods:
                return body, name, None
            why = NoSuchJob(f"job {job} has no pod {name}; its pods: {', '.join(pods[:10]) or 'none yet'}")
            try:
                kept = backend.kept_logs(job)
                if any(pod.name == name for pod in kept.pods()):
                    return body, name, kept
            except Mistake as mistake:
                why = NoSuchJob(f"{why}. {mistake}")
    raise why


@command_of_job
@click.option(
    "--rank",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Print the name of the pod that has this rank now.",
)
@click.option(
    "--index",
    type=click.IntRange(0),
    help="Print the name of the newest pod of this slot. Use this for jobs with a command, which have no ranks.",
)
@with_backend
def pod(backend: Backend, job: str, rank: int, index: int | None) -> None:
    """Print the name of the pod that has a given rank.

    \b
    Example: kubectl exec -it $(ddpjob pod first --rank 8) -c trainer -- bash
             kubectl cp $(ddpjob pod first):/checkpoints/a.pt a.pt -c trainer
             kubectl port-forward $(ddpjob pod first) 6006
    """
    from ddpjob.client.logs.log_follower import newest_pods, ranks_of_pods

    body, pods = backend.job(job), backend.pods(job)
    if index is not None:
        of_slot = [each.name for each in newest_pods(pods) if each.index == index]
        if not of_slot:
            raise Mistake(f"{job} has no pod in slot {index}")
        print_line(of_slot[0])
        return
    if body["spec"].get("command"):
        raise Mistake(f"{job} runs a command, so its ranks are not known; choose a pod with --index")
    held = ranks_of_pods(pods, body)
    found = next((name for name, ranks in held.items() if rank in ranks), None)
    if found is None:
        last = max((ranks[-1] for ranks in held.values() if ranks), default=None)
        there = "no pod has a rank yet" if last is None else f"the ranks are 0 to {last}"
        raise Mistake(f"{job} has no rank {rank}; {there}")
    print_line(found)


@command_of_job
@with_backend
def events(backend: Backend, job: str) -> None:
    """Print a job's events, the oldest first, with warnings marked by !.

    \b
    Example: ddpjob events first
    """
    backend.job(job)
    found = backend.events(job)
    for event in found:
        print_painted(job_text.event_line(event, utc_now()), "yellow" if event.warning else "")
    if not found:
        print_note(f"no events for {job}; a cluster keeps events for an hour")


@command_of_job
@click.option("--for", "goal", type=click.Choice(["end", "Complete", "Running", "Suspended"]), default="end",
              show_default=True, help="What to wait for.")  # fmt: skip
@click.option("--timeout", metavar="1h", help="Give up after this time, with exit code 124.")
@in_place
def wait(place: Place, job: str, goal: str, timeout: str | None) -> int:
    """Wait until a job has ended or has reached a state.

    Unlike `kubectl wait`, this command also returns when the job fails.

    \b
    Exit code: 0 the job is Complete (or in the state of --for), 1 it ended
    in a different state or was deleted, 124 timeout.
    Example: ddpjob wait first --timeout 2h && ddpjob logs first --tail 1
    """
    length = None if timeout is None else float(timeout) if timeout.isdigit() else seconds(timeout)
    if timeout is not None and length is None:
        raise click.UsageError(f"--timeout {timeout}: write a duration, such as 90s, 30m or 2h")
    backend = place.backend()
    backend.job(job)
    return wait_for(backend, job, goal, length)


@command_of_job
@click.option("--index", type=click.IntRange(0), multiple=True, help="Only pods of this slot.")
@with_backend
def stacks(backend: Backend, job: str, index: tuple[int, ...]) -> None:
    """Print the Python stack of every rank without stopping the training.

    \b
    Example: ddpjob stacks first --index 3
    """
    from ddpjob.client.logs.worker_stacks import stacks as taken

    backend.job(job)
    pods = [p for p in backend.pods(job) if p.index is not None and p.state == "Running"]
    pods = [p for p in pods if not index or p.index in index]
    if not pods:
        raise Mistake(f"{job}: no pod is running{' in these slots' if index else ''}")
    for pod, text in taken(backend, pods):
        print_line(f"--- pod {pod.name}")
        print_line(text)

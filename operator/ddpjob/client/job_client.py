"""The `Client` class, which manages jobs in a cluster or on this machine, for Python programs and
notebooks.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ddpjob.api.job_spec import JobSpec, Json
from ddpjob.api.job_status import Condition, JobStatus
from ddpjob.client.backends.backend import ENDED, Backend, Happened, LogOptions, Mistake, PodLine, Unreachable
from ddpjob.client.manifests.build_manifest import JobRequest, build
from ddpjob.client.restart_jobs import change, restart
from ddpjob.client.texts.job_text import phase, readable
from ddpjob.core.view import is_number

if TYPE_CHECKING:
    from ddpjob.client.job_html import MetricCurve
    from ddpjob.client.logs.log_follower import LogFollower


class JobFailed(Mistake):
    """The job was deleted while the client followed it, or ended without reaching `wait`'s goal.

    `job` is the last known state of this job.
    """

    def __init__(self, message: str, job: Job) -> None:
        super().__init__(message)
        self.job = job


@dataclass(frozen=True)
class Progress:
    """The progress of a job, as last reported by its training script.

    A value is None if the script has not reported it.
    """

    epoch: int | None = None
    epochs: int | None = None
    step: int | None = None
    """Number of completed optimizer steps."""
    steps: int | None = None
    percent: float | None = None
    """Percentage of the training that is completed, from 0 to 100."""
    loss: float | None = None
    samples_per_second: float | None = None
    """Number of samples that all ranks together process per second."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Maps the names of other numbers that the script reported, such as accuracy, to their
    values."""

    @classmethod
    def read(cls, progress: Mapping[str, Any]) -> Progress:
        """Read the `status.progress` of a job.

        Values that are not numbers are ignored, because a script may report anything.
        """
        whole = {name: _number(progress.get(name), int) for name in ("epoch", "epochs", "step", "steps")}
        percent, loss, speed = (_number(progress.get(name), float) for name in ("percent", "loss", "samplesPerSecond"))
        others = progress.get("metrics")
        metrics = {
            str(name): number
            for name, value in (others if isinstance(others, Mapping) else {}).items()
            if (number := _number(value, float)) is not None
        }
        return cls(**whole, percent=percent, loss=loss, samples_per_second=speed, metrics=metrics)


_Number = TypeVar("_Number", int, float)


def _number(value: Any, kind: type[_Number]) -> _Number | None:
    return kind(value) if is_number(value) else None


@dataclass(frozen=True)
class Job:
    """A snapshot of a job at one moment. `Client.get` returns a new snapshot."""

    name: str
    namespace: str
    """The job's namespace. On this machine, it is the manifest's namespace or `default`."""
    phase: str
    """Queued, Pending, Starting, Running, Restarting, Suspended, Complete or Failed. A job on this
    machine is Interrupted if the process that ran it was killed.
    """
    spec: JobSpec = field(repr=False)
    status: JobStatus = field(repr=False)
    """The job's `status`, including the conditions, the slots, and the causes of restarts."""
    body: Json = field(repr=False)
    """The complete DDPJob object, as `kubectl get -o json` prints it."""
    returned_by: Client | None = field(default=None, repr=False, compare=False)
    """The Client that returned this job. Methods of the job, such as `wait`, use this client."""

    @classmethod
    def read(cls, body: Json, client: Client | None = None) -> Job:
        """Return the job that a DDPJob object describes.

        Raises Mistake if the object contains values that only a newer release of the client knows.
        """
        meta = body["metadata"]
        with readable(body):
            spec = JobSpec.read(body["spec"])
        status = JobStatus.read(body.get("status") or {})
        return cls(meta["name"], str(meta.get("namespace", "")), phase(body), spec, status, body, client)

    def wait(self, **options: Any) -> Job:
        """Wait for this job as `Client.wait` does, with the same options."""
        return self._asked().wait(self, **options)

    def logs(self, **options: Any) -> Iterator[tuple[str, str]]:
        """Read the logs of this job as `Client.logs` does, with the same options."""
        return self._asked().logs(self, **options)

    def metrics(self) -> Sequence[Mapping[str, float]]:
        """Read the metrics of this job as `Client.metrics` does."""
        return self._asked().metrics(self)

    def plot(self, metric: str = "loss", *, output: str | PathLike[str] | None = None) -> MetricCurve:
        """Draw a metric of this job as `Client.plot` does."""
        return self._asked().plot(self, metric, output=output)

    def _asked(self) -> Client:
        if self.returned_by is None:
            raise Mistake(f"{self.name} was not returned by a Client; use Client.get(name)")
        return self.returned_by

    def _repr_html_(self) -> str:
        """Show the current state of the job and the curve of its loss in a notebook."""
        from ddpjob.client.job_html import job_html

        try:
            now = self._asked().get(self).body
        except Mistake:  # The job was deleted, or its cluster cannot be reached.
            return job_html(self.body, [])
        try:
            return job_html(now, self.metrics())
        except Mistake:  # The job has no metrics yet.
            return job_html(now, [])

    @property
    def progress(self) -> Progress:
        """The latest progress that the training script reported, such as epoch, step and loss."""
        return Progress.read(self.status.progress)

    @property
    def ended(self) -> bool:
        """Whether the job is Complete, Failed or Interrupted."""
        return self.phase in ENDED

    @property
    def failure(self) -> Condition | None:
        """The job's Failed condition, which has a reason and a message.

        None if the job has not failed.
        """
        return next((c for c in self.status.conditions if c.type == "Failed" and c.status), None)


_Item = TypeVar("_Item")


def if_allowed(read: Callable[[str], list[_Item]], job: str, faults: list[str]) -> list[_Item]:
    """Return the result of `read(job)`, such as the job's pods or events.

    If the user is not permitted to read it, return an empty list and add a note to `faults`. This
    is not an error, because the job's status contains most of the information anyway.
    """
    try:
        return read(job)
    except Unreachable:
        raise
    except Mistake as mistake:
        if not mistake.denied:
            raise
        faults.append(f"{getattr(read, '__name__', 'it')}: {mistake}")
        return []


class Client:
    """Manages the jobs in a namespace of a cluster, or the jobs on this machine.

    The methods and their results are the same in both cases. With the backend "kubernetes", the
    client connects to the kubeconfig's cluster as the kubeconfig's user. `namespace` and `context`
    default to those of the kubeconfig. With the backend "local", the client manages the jobs on
    this machine. Their files are in the folder $DDPJOB_RUNS or, if that is not set, in ./runs.

    A method that takes a job accepts the job's name or a Job object. Methods raise Mistake, with a
    message for the user, if a request cannot be carried out. NoSuchJob, JobFailed and Unreachable
    are subclasses of Mistake.
    """

    def __init__(
        self,
        backend: Literal["kubernetes", "local"] | Backend = "kubernetes",
        *,
        namespace: str | None = None,
        context: str | None = None,
        kubeconfig: str | None = None,
    ) -> None:
        self._backend = _backend(backend, namespace, context, kubeconfig) if isinstance(backend, str) else backend
        # Include large fields, because `Job.body` is documented as the complete object.
        self._backend.whole = True

    def train(
        self,
        program: Callable[..., object] | str | Path,
        *,
        args: Sequence[str | PathLike[str]] | Mapping[str, Any] = (),
        packages: Sequence[str] = (),
        image: str = "",
        name: str = "",
        nodes: int = 1,
        gpus: int | None = None,
        procs: int | None = None,
        spares: int = 0,
        min_nodes: int | None = None,
        max_nodes: int | None = None,
        mode: Literal["", "Standard", "Fast"] = "",
        env: Mapping[str, str | PathLike[str]] | None = None,
        cpu: str = "",
        memory: str = "",
        checkpoints: str | PathLike[str] = "",
        entry: str | PathLike[str] = "",
        code: str = "",
        git: str = "",
        settings: Mapping[str, Any] | None = None,
    ) -> Job:
        """Create a job that runs a function, a script, a folder with a script, or a module.

        `program`: the program to run. A function is sent as source code, so it must import and
        define everything that it uses. A script or folder on this machine is copied to the cluster;
        a folder of more than 1 MiB is copied through a bucket. On the local backend, scripts and
        folders run in place. An absolute path that does not exist on this machine is a file in the
        image. Any other string is the name of a module.
        `args`: the arguments of a script, or the keyword arguments of a function. Keyword arguments
        are sent as JSON, so a tuple arrives as a list.
        `packages`: the Python packages that a function needs, such as ["einops>=0.8"]. Before the
        function runs in a pod, pip installs the packages that are missing in the image. pip never
        replaces the image's torch.
        `image`: the container image, which can be any image with Python and PyTorch. The local
        backend ignores it.
        `name`: the job's name; by default, the program's name and four random characters.
        `nodes`: the number of training pods.
        `gpus`, `procs`: the number of GPUs per node, and the number of processes per node. The
        default is one GPU, and one process per GPU. With gpus=0, the job trains on the CPU.
        `spares`: the number of additional pods, each of which can replace a lost node immediately.
        `min_nodes`: if nodes are lost, training continues as long as at least this many remain.
        `max_nodes`: the maximum number of nodes that `scale` can set.
        `mode`: the value of spec.recovery.mode, which determines how training continues after a
        failure; by default, Standard.
        `env`: environment variables of the worker processes.
        `cpu`, `memory`: the CPU cores and memory that each node requests, such as "8" and "64Gi".
        `checkpoints`: where checkpoints are kept. This is "claim:NAME" for a
        PersistentVolumeClaim, "s3://BUCKET/FOLDER" for a bucket, or the absolute path of a folder
        that exists on every Kubernetes node.
        `entry`: if `program` is a folder, the script to start in this folder.
        `code`: if `program` is a folder of more than 1 MiB, the s3:// folder to upload it to. The
        default is the `code` folder in the s3:// folder of `checkpoints`.
        `git`: "URL" or "URL@REF" of a git repository that contains the program. REF is a branch, a
        tag or a full commit hash, and is resolved to a commit when the job is created. With `git`,
        `program` is a path in the repository, or the name of a module.
        `settings`: a mapping from field paths to values for other fields of spec, such as
        {"recovery.maxRestarts": 3, "storage.sharedMemory": "8Gi"}. If another parameter sets the
        same field, the value in `settings` replaces that parameter's value, but two mappings are
        merged. A list from another parameter cannot be replaced.
        """
        from ddpjob.client.manifests.manifest_sources import SUFFIXES, check_made

        if not callable(program) and str(program).endswith(SUFFIXES):
            raise Mistake(f"{program}: a manifest, not a script; pass it to submit()")
        source, words = "", args
        if callable(program):
            from ddpjob.client.manifests.function_source import script_of

            if not isinstance(args, Mapping) and len(args):
                raise TypeError(
                    "args: for a function, must be a mapping of its keyword arguments, such as {'epochs': 3}"
                )
            source, words = script_of(program, args if isinstance(args, Mapping) else {}, packages), ()
            program = str(getattr(program, "__name__", ""))
        elif packages:
            raise Mistake("packages: allowed only for a function; for a script, install the packages in the image")
        if isinstance(words, str | PathLike | Mapping):
            raise TypeError("args: for a script, must be a list of strings, such as ['--epochs', '3']")
        bodies = build(
            JobRequest(
                program=str(program), source=source, args=words, image=image, name=name, nodes=nodes, gpus=gpus,
                procs=procs, spares=spares, min_nodes=min_nodes, max_nodes=max_nodes, mode=mode, env=env or {},
                cpu=cpu, memory=memory, checkpoints=checkpoints, entry=entry, code=code,
                git=git, settings=settings or {},
            ),
            local=self._backend.local, say=lambda text: print(text, file=sys.stderr),
        )  # fmt: skip
        check_made(bodies[-1])
        return self.get(self._backend.create(bodies))

    def submit(self, manifest: str | Path | Mapping[str, Any]) -> Job:
        """Create the job that a manifest describes.

        `manifest` is a mapping, or the path of a YAML or JSON file that contains one DDPJob.
        """
        return self.get(self._backend.create([_read_manifest(manifest)]))

    def list(self) -> tuple[Job, ...]:
        """Return all jobs, oldest first."""
        return tuple(Job.read(body, self) for body in self._backend.jobs())

    def get(self, job: str | Job) -> Job:
        """Return the current state of a job. Raises NoSuchJob if the job does not exist."""
        return Job.read(self._backend.job(_name(job)), self)

    def watch(self, job: str | Job, *, timeout: float | None = None) -> Iterator[Job]:
        """Yield the current state of the job, and then its state after each change.

        The iterator stops when the job has ended, or after `timeout` seconds. Raises NoSuchJob if
        the job does not exist, and JobFailed if the job is deleted.
        """
        for body, gone in self._backend.changes(_name(job), timeout):
            seen = Job.read(body, self)
            if gone:
                raise JobFailed(f"{seen.name} was deleted", seen)
            yield seen
            if seen.ended:
                return

    def wait(
        self,
        job: str | Job,
        *,
        goal: Literal["Complete", "Running", "Suspended"] = "Complete",
        timeout: float | None = None,
        progress: bool | None = None,
    ) -> Job:
        """Wait until the job is in the phase `goal`, and return the job.

        If `progress` is true, a line of output shows the job's state, step, loss and speed while
        this method waits. By default, the line is shown only in a notebook. Raises JobFailed if the
        job is deleted or ends in a different phase, TimeoutError if the job has not reached the
        goal after `timeout` seconds, and ValueError for an unknown `goal`.
        """
        if goal not in ("Complete", "Running", "Suspended"):
            raise ValueError(f"goal {goal!r}: write 'Complete', 'Running' or 'Suspended'")
        line = ProgressLine(_in_notebook() if progress is None else progress)
        for seen in itertools.chain(
            self.watch(job, timeout=timeout), map(self.get, (job,))
        ):  # When the watch has ended because of `timeout`, read the job once more.
            line.show(seen)
            if seen.phase == goal:
                return seen
            if seen.ended:
                why = seen.failure
                text = f"{seen.name}: {why.reason}: {why.message}" if why else f"{seen.name} is {seen.phase}"
                raise JobFailed(text, seen)
        raise TimeoutError(f"{seen.name} is still {seen.phase} after {timeout} s")

    def logs(
        self,
        job: str | Job,
        *,
        rank: int | None = None,
        index: int | None = None,
        follow: bool = False,
        tail: int | None = None,
    ) -> Iterator[tuple[str, str]]:
        """Yield the lines in the logs of the training pods, as (pod name, line) pairs.

        `rank` selects the pod that runs this global rank, and leaves out lines that are known to
        come from other ranks in the pod. `index` selects the pods of the slot with this number.
        With `tail`, only the last `tail` lines of each existing pod's log are read. With `follow`,
        new lines are yielded until the job has ended. These include all lines of pods that are
        created in the meantime. Raises Mistake if nothing can be read, for example because no pod
        has this `rank` or `index`. If only some logs cannot be read, a Python warning is issued for
        each of them.
        """
        from ddpjob.client.logs.log_follower import Chosen, LogFollower

        chosen = Chosen(indices=() if index is None else (index,), ranks=() if rank is None else (rank,))
        stop = threading.Event()
        options = LogOptions(follow=follow, tail=tail, stop=stop)
        follower = LogFollower(self._backend, self._backend.job(_name(job)), options, chosen)
        return _read(follower, stop, named=rank is not None)

    def metrics(self, job: str | Job) -> Sequence[Mapping[str, float]]:
        """Return one row for each step that the training script has reported.

        A row maps names to numbers: `step`, `loss` and other metrics. The names of metrics on the
        test set begin with `eval_`. Raises Mistake if the script has not reported any step or, on a
        cluster, if no pod of the job is running.
        """
        from ddpjob.client.texts.metric_series import read_metrics, rows_of

        return rows_of(read_metrics(self._backend.metrics(self.get(job).name)))

    def frame(self, job: str | Job) -> Any:
        """Return the metrics as a pandas.DataFrame with one row per step. Requires pandas."""
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as error:
            raise Mistake(
                "frame() requires pandas; run `pip install pandas`, or call metrics(), which returns the same rows"
            ) from error
        return pandas.DataFrame(self.metrics(job)).set_index("step")

    def plot(self, job: str | Job, metric: str = "loss", *, output: str | PathLike[str] | None = None) -> MetricCurve:
        """Return the curve of a metric over the steps. A notebook displays the curve as a picture.

        Dashed lines mark restarts. `metric` is a name in the rows that `metrics` returns. If
        `output` is given, the curve is also written to this .svg file. Raises Mistake if the metric
        has values for fewer than two steps.
        """
        from ddpjob.client.job_html import MetricCurve
        from ddpjob.client.texts.metric_series import read_metrics, rows_of

        name = _name(job)
        if output is not None and Path(output).suffix != ".svg":
            raise Mistake(
                f"output={str(output)!r}: must end in .svg; for .png and .pdf, run `ddpjob plot {name} -o FILE`"
            )
        series = read_metrics(self._backend.metrics(self.get(name).name))
        rows = rows_of(series)
        curve = MetricCurve(metric, [(row["step"], row[metric]) for row in rows if metric in row], series.starts[1:])
        if len(curve.points) < 2:
            known = sorted({column for row in rows for column in row} - {"step"})
            raise Mistake(
                f"{name} has fewer than two values of {metric} so far; its metrics: {', '.join(known) or 'none'}"
            )
        if output is not None:
            Path(output).write_text(curve._repr_svg_(), encoding="utf-8")
        return curve

    def stacks(self, job: str | Job) -> Mapping[str, str]:
        """Return the Python stacks of the processes in running training pods, by pod name.

        Training continues while the stacks are read.
        """
        from ddpjob.client.logs.worker_stacks import stacks

        running = [pod for pod in self.pods(job) if pod.index is not None and pod.state == "Running"]
        return {pod.name: text for pod, text in stacks(self._backend, running)}

    def rerun(self, job: str | Job, *, fresh: bool = False) -> Job:
        """Run a finished job again, with the same name and spec, from its last checkpoint.

        With `fresh`, training starts from scratch, and the old checkpoints are kept unless `delete`
        would delete them.
        """
        from ddpjob.client.rerun_jobs import rerun

        rerun(self._backend, _name(job), fresh=fresh)
        return self.get(job)

    def events(self, job: str | Job) -> Sequence[Happened]:
        """Return the job's events, oldest first. A cluster usually keeps events for an hour."""
        return self._backend.events(self.get(job).name)

    def why(self, job: str | Job) -> str:
        """Explain why the job is waiting or has failed, and what to do about it.

        The text is the same as that of `ddpjob why`.
        """
        from ddpjob.api.job_status import utc_now
        from ddpjob.client.texts.job_text import why

        body = self._backend.job(_name(job))
        return "\n".join(why(body, if_allowed(self._backend.pods, _name(job), []), utc_now()))

    def pods(self, job: str | Job) -> Sequence[PodLine]:
        """Return the job's pods: first the coordinator's pod, then the pods of each slot."""
        return self._backend.pods(self.get(job).name)

    def validate(self, manifest: str | Path | Mapping[str, Any]) -> None:
        """Check a manifest without a cluster, as `ddpjob validate` does.

        Raises Mistake, with one line for each fault, if the manifest is invalid.
        """
        _read_manifest(manifest)

    def restart(self, job: str | Job, *, timeout: float = 600) -> None:
        """Replace all of a job's pods.

        This suspends the job, waits until its pods have stopped, and resumes it. Raises Mistake if
        the pods do not stop within `timeout` seconds.
        """
        restart(self._backend, _name(job), timeout)

    def scale(self, job: str | Job, nodes: int) -> None:
        """Change the number of nodes.

        Training restarts from the last checkpoint with the new number of nodes.
        """
        change(self._backend, _name(job), {"nodes": nodes})

    def suspend(self, job: str | Job) -> None:
        """Suspend the job. Its pods save a checkpoint and stop; the job itself is kept."""
        change(self._backend, _name(job), {"runPolicy": {"suspend": True}})

    def resume(self, job: str | Job) -> None:
        """Continue a suspended job from its last checkpoint."""
        change(self._backend, _name(job), {"runPolicy": {"suspend": False}})

    def kill(self, pod: str | PodLine) -> None:
        """Kill a pod in order to test recovery.

        The pod is deleted as with `kubectl delete pod --force --grace-period=0`.
        """
        self._backend.kill(pod if isinstance(pod, str) else pod.name)

    def delete(self, job: str | Job) -> None:
        """Delete a job and its pods.

        Checkpoints on volumes are kept, unless the job's
        storage.checkpoints.claimTemplate.whenDeleted is Delete. On this machine, the same rule
        applies to the folder RUNS/JOB/checkpoints.
        """
        self._backend.delete(_name(job))


def _in_notebook() -> bool:
    return "ipykernel" in sys.modules


class ProgressLine:
    """A line of output that is overwritten on each change.

    If `wanted` is false, nothing is printed.
    """

    def __init__(self, wanted: bool) -> None:
        self._wanted, self._width, self._last = wanted, 0, ""

    def show(self, job: Job) -> None:
        status = job.status.progress
        figures = (status.get(name) for name in ("display", "lossDisplay", "speedDisplay", "eta"))
        text = "  ".join([job.name, job.phase, *(str(figure) for figure in figures if figure)])
        text = "".join(c for c in text if c.isprintable())
        if self._wanted and text != self._last:
            self._last, self._width = text, max(self._width, len(text))
            print(f"\r{text.ljust(self._width)}", end="\n" if job.ended else "", flush=True)


def _read_manifest(manifest: str | Path | Mapping[str, Any]) -> Json:
    """Read and check a manifest, and return it without its status. Raises Mistake."""
    from ddpjob.client.manifests.manifest_sources import SUFFIXES, check_made, read_job

    if not isinstance(manifest, Mapping) and not str(manifest).endswith(SUFFIXES):
        raise Mistake(
            f"{manifest}: a manifest's name must end in {', '.join(SUFFIXES)}; for a script, use train() instead"
        )
    read = manifest if isinstance(manifest, Mapping) else read_job(manifest)
    body = {key: value for key, value in read.items() if key != "status"}
    if isinstance(manifest, Mapping):
        check_made(body, "the manifest")
    return body


def _name(job: str | Job) -> str:
    return job if isinstance(job, str) else job.name


def _read(follower: LogFollower, stop: threading.Event, *, named: bool) -> Iterator[tuple[str, str]]:
    """Yield a (pod name, line) pair for each line. Raise Mistake if nothing could be read.

    `named` is true if the caller chose a rank. A rank without any lines is then also an error,
    because it may not exist.
    """
    try:
        for line in follower.lines():
            yield line.pod.name, line.text.decode(errors="replace")
    finally:
        # Stop the threads that read the logs, even if the caller does not read all lines.
        stop.set()
    if not follower.seen:
        why = "\n".join(follower.notes) or (follower.why_nothing() if named else follower.missing_slots())
        if why:
            raise Mistake(why)
    for note in follower.notes:
        warnings.warn(note, stacklevel=2)


def _backend(kind: str, namespace: str | None, context: str | None, kubeconfig: str | None) -> Backend:
    if kind == "local":
        from ddpjob.client.backends.process_backend import ProcessBackend

        return ProcessBackend()
    if kind != "kubernetes":
        raise ValueError(f"backend {kind!r}: write 'kubernetes' or 'local'")
    from ddpjob.client.backends.api_server import ApiServer
    from ddpjob.client.backends.cluster_backend import ClusterBackend

    return ClusterBackend(ApiServer.open(kubeconfig, context), namespace)

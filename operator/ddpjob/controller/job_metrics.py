"""Prometheus metrics of jobs, computed from the statuses that the operator reads and writes.

Events are counted when a job's status in the cache changes. Each status that the API server has
stored is counted once, whether it reached the cache in a response or through a watch. Events that
happened before this replica first read the job, or while no replica acted, are not counted.
Counters start at 0 with the process, as Prometheus expects.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime

from ddpjob_runtime import protocol
from prometheus_client import REGISTRY, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ddpjob.api.job import DDPJob
from ddpjob.api.job_status import ConditionType, JobStatus, Phase, Restart, SlotState, known_time
from ddpjob.core.failures.classify import PLANNED, Cause
from ddpjob.core.status.conditions import QUEUE_NOT_SERVED
from ddpjob.core.status.repeated import makes_new_steps
from ddpjob.core.status.running import STEP_OVERDUE
from ddpjob.core.view import is_number
from ddpjob.engine.ports import JobKey

MOST_JOBS = 5000
"""Maximum number of jobs that have their own series. If there are more jobs, those that have not
ended are chosen first, one job from each namespace in turn.
"""
MOST_PAYERS = 1000
"""Maximum number of namespace and queue pairs whose GPU seconds have their own series. The GPU
seconds of all later pairs are summed under OTHER.
"""
OTHER = "Other"
"""The label value for every unknown reason. If every reason became a label value, anybody who can
write a job's status could create any number of series.
"""
FAILURES = frozenset(
    {
        *("RestartBudgetSpent", "RuleFailed", "InitFailure", "ConfigurationError", "ProgramError"),
        *("InvalidPodTemplate", "InvalidPod", "InvalidClaim", "ClassRefused"),
        *("DeadlineExceeded", "ErrImagePull", "ImagePullBackOff", "InvalidImageName"),
    }
)
"""Known reasons of the Failed condition. Each has its own series."""
_CAUSES = frozenset(str(cause) for cause in Cause)
_STARTS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200)
_RECOVERIES = (0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
_STEPS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)

CREATED = Counter("ddpjob_jobs_created", "Jobs that the operator has started")
COMPLETED = Counter("ddpjob_jobs_completed", "Jobs that have completed")
FAILED = Counter("ddpjob_jobs_failed", "Failed jobs, by the reason of the condition Failed", ["reason"])
RESTARTS = Counter(
    "ddpjob_restarts",
    "Restarts of jobs, by cause and by whether they count against recovery.maxRestarts (true, false)",
    ["reason", "counted"],
)
TO_PODS = Histogram(
    "ddpjob_time_to_pods_seconds",
    "Time from a job's start or resumption until all its pods have a Kubernetes node",
    buckets=_STARTS,
)
TO_RUNNING = Histogram(
    "ddpjob_time_to_running_seconds",
    "Time from a job's start or resumption until its group runs, excluding starts with a break before that",
    buckets=_STARTS,
)
TO_FIRST_STEP = Histogram(
    "ddpjob_time_to_first_step_seconds", "Time from a job's start until its first step is reported", buckets=_STARTS
)
RECOVERY = Histogram(
    "ddpjob_recovery_seconds",
    "Time from a break until the next step (or until the group runs, if the script reports no steps), by cause,"
    " excluding planned restarts",
    ["reason"],
    buckets=_RECOVERIES,
)
GPU_SECONDS = Counter(
    "ddpjob_gpu_seconds",
    "GPU seconds of all jobs, deleted ones included, by namespace and by Kueue's ClusterQueue (empty without a queue)",
    ["namespace", "queue"],
)
LOST_STEPS = Histogram(
    "ddpjob_lost_steps",
    "Steps by which a job's reported step fell back after a break, excluding jobs that do not report steps",
    buckets=_STEPS,
)


def _begin_at_0() -> None:
    """Create all series with the value 0, because Prometheus cannot see an increase in a series
    that first appears with the value 1.
    """
    for cause in sorted(_CAUSES):
        RESTARTS.labels(cause, "false")
        if cause not in PLANNED:
            RESTARTS.labels(cause, "true")
            RECOVERY.labels(cause)
    for reason in sorted((*FAILURES, OTHER)):
        FAILED.labels(reason)


_begin_at_0()


@dataclass
class _Account:
    """Pod seconds and useful seconds of one job, summed since this replica first read the job."""

    job: DDPJob
    since: float
    pod_seconds: float = 0.0
    useful_seconds: float = 0.0
    step_at_break: int | None = None
    """Number of the last step before a break, until the first step after the break is reported.
    None at all other times.
    """

    def at(self, now: float) -> tuple[float, float]:
        """Return the job's pod seconds and useful seconds at the time `now`."""
        status, passed = self.job.status, now - self.since
        pods, training = _usage(status)
        useful = training if makes_new_steps(status) else 0
        return self.pod_seconds + pods * passed, self.useful_seconds + useful * passed


class JobAccounts:
    """The accounts of all jobs while this replica is the leader of a shard.

    `changed` must be called for every change to a job in the cache.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts: dict[JobKey, _Account] = {}
        self._ours: set[JobKey] = set()
        """Jobs that this operator acts on. All other jobs are counted by the operators that act on
        them.
        """

    def acts_on(self, key: JobKey, *, acts: bool) -> None:
        """Record whether this operator acts on the job. Each reconcile calls this before it writes
        anything.

        A job whose spec names a different controller is never counted, because this operator does
        not learn how it ends.
        """
        account = self._accounts.get(key)
        if acts and account is not None and not account.job.spec.managed_elsewhere:
            self._ours.add(key)
        else:
            self._ours.discard(key)

    def changed(self, before: DDPJob | None, after: DDPJob | None) -> None:
        """Count the difference between two consecutive versions of a job.

        `before` is None for a new job, and `after` is None for a deleted one.
        """
        job = after or before
        assert job is not None
        key = JobKey(job.namespace, job.name)
        if after is None:
            self._accounts.pop(key, None)
            self._ours.discard(key)
            return
        now = self._clock()
        account = self._accounts.get(key)
        if before is None or account is None or before.uid != after.uid:
            self._accounts[key] = _Account(after, now)
            return
        account.pod_seconds, account.useful_seconds = account.at(now)
        account.job, account.since = after, now
        if key in self._ours:
            _count(before.status, after.status, account)
            _count_gpu_seconds(before, after)

    def jobs(self) -> list[_Account]:
        """Return the accounts of the jobs that this operator acts on.

        This method can be called from any thread.
        """
        return [account for key, account in list(self._accounts.items()) if key in self._ours]

    def now(self) -> float:
        """Return the current time in seconds on the clock that the accounts use."""
        return self._clock()


def _usage(status: JobStatus) -> tuple[int, int]:
    """Return the number of pods that hold resources, and the number of pods that train."""
    if status.terminal:
        return 0, 0
    pods = sum(bool(s.node) and s.state in (SlotState.CREATED, SlotState.RUNNING) for s in status.slots)
    trains = status.holds(ConditionType.RUNNING) and not status.holds(ConditionType.RESTARTING)
    return pods, min(pods, status.ready) if trains and not _is_stalled(status) else 0


def _is_stalled(status: JobStatus) -> bool:
    return _reason(status, ConditionType.RUNNING) == STEP_OVERDUE


def _reason(status: JobStatus, kind: ConditionType) -> str:
    condition = status.condition(kind)
    return condition.reason if condition is not None else ""


# --- events -----------------------------------------------------------------------------------------------------


def _count(old: JobStatus, new: JobStatus, account: _Account) -> None:
    if old.phase is None and new.phase is not None:
        CREATED.inc()
    if _became(old, new, ConditionType.COMPLETE):
        COMPLETED.inc()
    if _became(old, new, ConditionType.FAILED):
        reason = _reason(new, ConditionType.FAILED)
        FAILED.labels(reason if reason in FAILURES else OTHER).inc()
    _count_start(old, new)
    _count_restarts(old, new, account)


def _became(old: JobStatus, new: JobStatus, kind: ConditionType) -> bool:
    return new.holds(kind) and not old.holds(kind)


def _count_start(old: JobStatus, new: JobStatus) -> None:
    start = new.start_time
    if start is None:
        return
    # Count a start only if the group reached its first run without a break. After a break,
    # `ddpjob_recovery_seconds` records the duration instead.
    first = not any(restart.time >= start for restart in new.restarts.recent)
    for kind, histogram in ((ConditionType.SCHEDULED, TO_PODS), (ConditionType.RUNNING, TO_RUNNING)):
        condition = new.condition(kind)
        if first and condition is not None and _became(old, new, kind):
            histogram.observe(_between(start, condition.since))
    stepped = new.progress.get("step") is not None or new.progress.get("epoch") is not None
    moment = known_time(new.progress.get("updatedAt"))
    if new.trained and not old.trained and stepped and moment is not None:
        TO_FIRST_STEP.observe(_between(start, moment))


def _between(begin: datetime, end: datetime) -> float:
    """Return the number of seconds between two times.

    If the clock was set back between them, return 0.
    """
    return max(0.0, (end - begin).total_seconds())


def _count_restarts(old: JobStatus, new: JobStatus, account: _Account) -> None:
    fresh = max(0, new.restarts.total - old.restarts.total)
    known = {_identity(restart): restart for restart in old.restarts.recent}
    for number, restart in enumerate(reversed(new.restarts.recent)):
        reason = _known_cause(restart)
        if number < fresh:
            RESTARTS.labels(reason, str(restart.counted).lower()).inc()
        # Losing a coordinator in Fast mode does not begin a round, because training continues. Such
        # a restart has no recovery time to observe.
        before = known.get(_identity(restart))
        timed = restart.seconds is not None and (number < fresh or (before is not None and before.seconds is None))
        if timed and restart.round and restart.reason not in PLANNED:
            RECOVERY.labels(reason).observe(max(0.0, restart.seconds or 0.0))
    unseen = fresh - len(new.restarts.recent)
    # There were more restarts than a status can list.
    if unseen > 0:
        RESTARTS.labels(OTHER, "false").inc(unseen)
    _count_lost_steps(old, new, new.restarts.recent[-fresh:] if fresh else (), account)


def _identity(restart: Restart) -> tuple[object, ...]:
    """Return the parts of a restart that do not change when the restart's duration becomes known.

    Two entries with equal parts stand for one restart.
    """
    return restart.time, restart.pod, restart.reason, restart.round


def _known_cause(restart: Restart) -> str:
    return restart.reason if restart.reason in _CAUSES else OTHER


_payers: set[tuple[str, str]] = set()


def _count_gpu_seconds(before: DDPJob, after: DDPJob) -> None:
    """Count the GPU seconds that a job has used between two versions, for the queue whose quota it
    used.
    """
    added = after.status.gpu_seconds - before.status.gpu_seconds
    if added <= 0:
        return
    quota = before.status.queue or after.status.queue
    payer = after.namespace, quota.cluster_queue if quota is not None else ""
    if payer not in _payers and len(_payers) >= MOST_PAYERS:
        payer = OTHER, OTHER
    _payers.add(payer)
    GPU_SECONDS.labels(*payer).inc(added)


def _count_lost_steps(old: JobStatus, new: JobStatus, fresh: Iterable[Restart], account: _Account) -> None:
    """Count the steps that a job lost through a break.

    The number is the difference between the last step before the break and the first step reported
    after it.
    """
    before, step = _step(old), _step(new)
    if any(restart.round and restart.reason not in PLANNED for restart in fresh):
        known = [s for s in (before, step, account.step_at_break) if s is not None]
        account.step_at_break = max(known, default=None)
    elif account.step_at_break is not None and step is not None and step != before and _usage(new)[1]:
        LOST_STEPS.observe(max(0, account.step_at_break - step))
        account.step_at_break = None


def _step(status: JobStatus) -> int | None:
    step = status.progress.get("step")
    return int(step) if is_number(step) else None


# --- series of single jobs --------------------------------------------------------------------------------------

JOB_LABELS = ("namespace", "job_name")
_TEXTS = {
    "ddpjob_job_phase": "1 for the current phase of a job",
    "ddpjob_job_failed": "1 for a job that has failed, with the reason",
    "ddpjob_job_nodes_wanted": "Nodes requested by a job that has not ended (spec.nodes)",
    "ddpjob_job_nodes_training": "Nodes that train as one group",
    "ddpjob_job_stalled": "1 while the next step is overdue (reason StepOverdue), else 0",
    "ddpjob_job_coordinator_unreachable": "1 while the job's coordinator does not respond to the operator, else 0",
    "ddpjob_job_not_isolated": "1 while spec.network.isolate has no effect (the condition Isolated is False), else 0",
    "ddpjob_job_queue_not_served":
        "1 while a job waits in a queue that the cluster does not serve (reason QueueNotServed), else 0",
    "ddpjob_job_restarts": "Restarts of a job since it began, for any cause",
    "ddpjob_job_budget_spent_restarts": "Restarts that currently count against recovery.maxRestarts",
    "ddpjob_job_budget_restarts": "Restarts that recovery.maxRestarts allows",
    "ddpjob_job_pod_seconds":
        "Time that pods have held resources of a Kubernetes node, summed over a job's pods, spares included",
    "ddpjob_job_useful_seconds":
        "Time in which nodes took new steps, summed over a job's nodes, excluding starts, restarts, stalls and"
        " known repeated steps",
    "ddpjob_job_gpu_seconds":
        "GPU seconds of a job since it began (status.gpuSeconds), written at least every ten minutes",
    "ddpjob_job_gpus": "GPUs that a job's pods hold, spares included; no sample without GPUs",
    "ddpjob_job_repeated_steps": "Complete steps that were repeated after restarts of a job, as far as known",
    "ddpjob_job_repeated_seconds": "Time in which a job repeated steps after restarts, as far as known",
    "ddpjob_job_unknown_repeats": "Restarts of a job with an unknown number of repeated steps",
    "ddpjob_job_snapshots_refused":
        "1 while the training states do not fit into the pods' memory (the condition SnapshotsHeld is False), else 0",
    "ddpjob_job_slow_rank":
        "1 while a clearly slow rank is not moved (the condition RanksKeepPace is False), else 0",
    "ddpjob_train_checkpoint_timestamp_seconds":
        "Unix time at which the newest checkpoint was written to disk, as reported",
    "ddpjob_train_copy_timestamp_seconds":
        "Unix time at which the newest checkpoint in the bucket was saved, as reported",
    "ddpjob_train_copy_behind_seconds":
        "Time for which the newest checkpoints have been missing from the bucket, as reported",
    "ddpjob_train_epoch": "Epoch that the script has reported",
    "ddpjob_train_step": "Step that the script has reported; after a break, falls back to the checkpoint's step",
    "ddpjob_train_planned_steps": "Total number of steps of the training, as reported",
    "ddpjob_job_steps_at_risk":
        "Maximum number of complete steps that a loss would now repeat, given the states in memory; no sample"
        " without such states",
    "ddpjob_train_loss": "Training loss that the script has reported",
    "ddpjob_train_samples_per_second": "Samples per second over all ranks, as reported; only while nodes train",
}  # fmt: skip
_COUNTERS = (
    *("ddpjob_job_restarts", "ddpjob_job_pod_seconds", "ddpjob_job_useful_seconds", "ddpjob_job_gpu_seconds"),
    *("ddpjob_job_repeated_steps", "ddpjob_job_repeated_seconds", "ddpjob_job_unknown_repeats"),
)
_MORE_LABELS = {"ddpjob_job_phase": ["phase"], "ddpjob_job_failed": ["reason"]}
_OF_PROGRESS = {
    "epoch": "ddpjob_train_epoch", "step": "ddpjob_train_step", "steps": "ddpjob_train_planned_steps",
    protocol.AT_RISK: "ddpjob_job_steps_at_risk",
    "loss": "ddpjob_train_loss", "samplesPerSecond": "ddpjob_train_samples_per_second",
}  # fmt: skip
_OF_METRICS = {
    protocol.CHECKPOINT_TIME: "ddpjob_train_checkpoint_timestamp_seconds",
    protocol.COPY_TIME: "ddpjob_train_copy_timestamp_seconds",
    protocol.COPY_BEHIND: "ddpjob_train_copy_behind_seconds",
}


class JobSeries(Collector):
    """The series of individual jobs, computed from the jobs' current state at each scrape.

    A deleted job therefore no longer has any series.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._terms: list[JobAccounts] = []

    def begin(self, accounts: JobAccounts) -> None:
        """Start exporting metrics for these accounts' jobs, because this replica now leads their
        shard.
        """
        with self._lock:
            self._terms.append(accounts)

    def end(self, accounts: JobAccounts) -> None:
        """Stop exporting metrics for these accounts' jobs, because this replica no longer leads
        their shard.

        A different replica exports these metrics instead.
        """
        with self._lock:
            self._terms.remove(accounts)

    def describe(self) -> Iterator[Metric]:
        """Yield all metric families without samples.

        prometheus_client needs them when the collector is registered.
        """
        yield from _make_families().values()

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families with their current samples.

        prometheus_client calls this in a separate thread.
        """
        with self._lock:
            terms = list(self._terms)
        found = [(account, *account.at(term.now())) for term in terms for account in term.jobs()]
        found.sort(key=lambda each: (each[0].job.status.terminal, each[0].job.namespace, each[0].job.name))
        # The first job of every namespace comes before the second job of any namespace, and so on.
        # One namespace with many jobs therefore cannot displace the series of all others.
        turns = defaultdict[tuple[bool, str], Iterator[int]](itertools.count)
        found.sort(key=lambda each: (ended := each[0].job.status.terminal, next(turns[ended, each[0].job.namespace])))
        families = _make_families()
        phases = Tally(account.job.status.phase or Phase.PENDING for account, *_ in found)
        for phase in Phase:
            families["ddpjob_jobs"].add_metric([phase], phases[phase])
        for account, pod_seconds, useful_seconds in found[:MOST_JOBS]:
            _add(families, account.job, pod_seconds, useful_seconds)
        families["ddpjob_operator_jobs_without_series"].add_metric([], max(0, len(found) - MOST_JOBS))
        yield from families.values()


_Families = dict[str, GaugeMetricFamily | CounterMetricFamily]


def _make_families() -> _Families:
    jobs, others = "Jobs by phase, in the shards for which this replica acts", "ddpjob_operator_jobs_without_series"
    beyond = f"Jobs beyond the first {MOST_JOBS}, which do not get their own series"
    families: _Families = {
        "ddpjob_jobs": GaugeMetricFamily("ddpjob_jobs", jobs, labels=["phase"]),
        others: GaugeMetricFamily(others, beyond, labels=[]),
    }
    for name, text in _TEXTS.items():
        kind = CounterMetricFamily if name in _COUNTERS else GaugeMetricFamily
        families[name] = kind(name, text, labels=[*JOB_LABELS, *_MORE_LABELS.get(name, ())])
    return families


def _add(families: _Families, job: DDPJob, pod_seconds: float, useful_seconds: float) -> None:
    labels, status = [job.namespace, job.name], job.status

    def add(name: str, value: float, *more: str) -> None:
        families[name].add_metric([*labels, *more], value)

    add("ddpjob_job_phase", 1, status.phase or Phase.PENDING)
    add("ddpjob_job_restarts", status.restarts.total)
    if status.holds(ConditionType.FAILED):
        reason = _reason(status, ConditionType.FAILED)
        add("ddpjob_job_failed", 1, reason if reason in FAILURES else OTHER)
    add("ddpjob_job_pod_seconds", pod_seconds)
    add("ddpjob_job_useful_seconds", useful_seconds)
    if status.gpu_use is not None or status.gpu_seconds:
        add("ddpjob_job_gpu_seconds", status.gpu_seconds)
    if status.gpu_use is not None:
        add("ddpjob_job_gpus", status.gpu_use.held)
    add("ddpjob_job_repeated_steps", status.restarts.repeated_steps)
    add("ddpjob_job_repeated_seconds", status.restarts.repeated_seconds)
    add("ddpjob_job_unknown_repeats", status.restarts.unknown_repeats)
    if status.terminal:
        return
    add("ddpjob_job_nodes_wanted", job.spec.nodes)
    training = _usage(status)[1]
    add("ddpjob_job_nodes_training", training)
    add("ddpjob_job_stalled", _is_stalled(status))
    add("ddpjob_job_coordinator_unreachable", _reason(status, ConditionType.RUNNING) == "CoordinatorUnreachable")
    add("ddpjob_job_queue_not_served", _reason(status, ConditionType.SUSPENDED) == QUEUE_NOT_SERVED)
    isolated = status.condition(ConditionType.ISOLATED)
    add("ddpjob_job_not_isolated", isolated is not None and not isolated.status)
    held = status.condition(ConditionType.SNAPSHOTS_HELD)
    add("ddpjob_job_snapshots_refused", bool(training and held is not None and not held.status))
    pace = status.condition(ConditionType.RANKS_KEEP_PACE)
    add("ddpjob_job_slow_rank", bool(training and pace is not None and not pace.status))
    add("ddpjob_job_budget_spent_restarts", status.restarts.counted)
    add("ddpjob_job_budget_restarts", job.spec.recovery.max_restarts)
    own = status.progress.get("metrics")
    for values, names in ((own if isinstance(own, dict) else {}, _OF_METRICS), (status.progress, _OF_PROGRESS)):
        for name, metric in names.items():
            value = values.get(name)
            if is_number(value) and (training or name not in ("samplesPerSecond", protocol.AT_RISK)):
                add(metric, value)


SERIES = JobSeries()
REGISTRY.register(SERIES)

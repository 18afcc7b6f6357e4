"""Decides why a pod ended, from the states of the pod and its host. `policy` decides whether that
counts against the restart budget.

Kubernetes reports the reason in many places, often in several at once: a condition of the pod, its
reason, the state of its container, the exit code, and the last output of the program. An evicted
pod has an exit code too, and a container whose host was restarted has an arbitrary exit code. The
sources are therefore read in a fixed order, and the first source with an answer decides
(`explain_end`).

1. The pod as a whole (`_by_conditions`): a lost host, a disruption, an eviction, a rejection by the
   kubelet. These causes take precedence over every exit code.
2. The container's state (`_by_container`): lost with its host, out of memory, cannot start.
3. The launcher's own exit codes (`_by_launcher`), or, for a `command`, the failed rank that
   torchrun names (`_by_rank`).
4. The exit code and last output of the program (`_by_program`) or, if the program never ran, the
   end of an init container or a fault of the host (`_never_began`).

Examples:

    disruption=EvictionByEvictionAPI, exit code 143      Evicted: rule 1
    reason=OOMKilled, exit code 137                      OOMKilled: rule 2
    reason=Error, exit code 137                          ExitCode: the signal's sender is unknown
    reason=ContainerStatusUnknown, exit code 137         NodeFault: rule 2, the host lost it

A pod that no longer exists is judged by its last known state (`explain_vanished`).
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import TypeGuard

from ddpjob_runtime.protocol import (
    EXIT_FENCED,
    EXIT_INIT_FAILURE,
    EXIT_RENDEZVOUS_LOST,
    EXIT_STOPPED,
    EXIT_UNFIT,
    OWN_LOG_LINE,
    RANK_FAILURE,
    escaped,
    last_lines,
)

from ddpjob.api.job_status import Restart
from ddpjob.core.world import CODE_CONTAINER, ContainerView, HostView, PodView, Role, is_down

_TRACEBACK_LIMIT = 3000
"""Maximum number of characters in a traceback. A longer traceback is cut at the front, because its
end names the error."""


class Cause(StrEnum):
    """The reasons why pods end and groups restart.

    Users read these words in `status.restarts.recent` and in conditions.
    """

    WORKER_FAILED = "WorkerFailed"
    EXIT_CODE = "ExitCode"
    OOM_KILLED = "OOMKilled"
    STORAGE_EXCEEDED = "StorageExceeded"
    DISRUPTION = "Disruption"
    PREEMPTED = "Preempted"
    EVICTED = "Evicted"
    DELETED = "Deleted"
    NODE_LOST = "NodeLost"
    NODE_FAULT = "NodeFault"
    NODE_UNHEALTHY = "NodeUnhealthy"
    POD_UNHEALTHY = "PodUnhealthy"
    SLOW_RANK = "SlowRank"
    START_ERROR = "StartError"
    PREFLIGHT_FAILED = "PreflightFailed"
    PEER_LOST = "PeerLost"
    HANG = "Hang"
    INIT_FAILURE = "InitFailure"
    RENDEZVOUS_LOST = "RendezvousLost"
    FENCED = "Fenced"
    COORDINATOR_LOST = "CoordinatorLost"
    SCALED = "Scaled"
    JOINED = "Joined"
    SPEC_CHANGED = "SpecChanged"
    KEY_CHANGED = "KeyChanged"
    RUNTIME_CHANGED = "RuntimeChanged"
    YIELDED = "Yielded"


PLANNED = frozenset({Cause.JOINED, Cause.SCALED, Cause.SPEC_CHANGED, Cause.KEY_CHANGED, Cause.RUNTIME_CHANGED})
"""Causes of planned restarts. No failure precedes such a restart."""


def names_pod(restart: Restart) -> bool:
    """Whether a single pod causes the restart, so that messages about the restart name this pod.

    A hang or a changed spec affects the whole group. In these cases, messages name the reason
    instead.
    """
    return restart.index is not None or restart.reason == Cause.COORDINATOR_LOST


def describe_ranks(group_rank: int, procs: int) -> str:
    """Describe the ranks of a node: `rank 1`, or `ranks 2 to 3` if the node has several."""
    first = group_rank * procs
    return f"rank {first}" if procs == 1 else f"ranks {first} to {first + procs - 1}"


def with_traceback(summary: str, traceback: str) -> str:
    """Return the summary, followed by the end of the traceback if there is one."""
    tail = last_lines(traceback, _TRACEBACK_LIMIT)
    return f"{summary}\n{tail}" if tail else summary


def without_wait(message: str) -> str:
    """Return a restart's message without the note about the back-off, such as `; waits 10 s`.

    A failed job gets no new pod, so messages about its failure must not name a back-off. The
    back-off also differs each time, so errors are compared without it.
    """
    return _WAIT.sub("", message)


_WAIT = re.compile(r"; waits [0-9.e+]+ s$", re.MULTILINE)


_SHARED_MEMORY_FULL = "; /dev/shm was probably full: raise storage.sharedMemory"
_SAYS_SHARED_MEMORY = re.compile(
    r"(?:out of|insufficient|allocate) shared memory|write to file </torch_", re.IGNORECASE
)
"""Matches the messages that torch prints when SIGBUS kills a data-loader worker, or when a tensor
does not fit in /dev/shm."""


def if_shared_memory_full(said: str, signal_name: str = "") -> str:
    """Return advice on enlarging /dev/shm if /dev/shm was probably full; otherwise an empty string.

    A full /dev/shm is likely if SIGBUS killed the program, or if `said` is one of torch's messages
    about shared memory.
    """
    return _SHARED_MEMORY_FULL if signal_name == "SIGBUS" or _SAYS_SHARED_MEMORY.search(said) else ""


_DISRUPTIONS = {
    "PreemptionByScheduler": Cause.PREEMPTED,
    "EvictionByEvictionAPI": Cause.EVICTED,
    "TerminationByKubelet": Cause.EVICTED,
    "DeletionByTaintManager": Cause.DISRUPTION,
    "DeletionByPodGC": Cause.NODE_LOST,
}


@dataclass(frozen=True)
class End:
    """How and why a pod has become unusable."""

    cause: Cause
    message: str
    traceback: str = ""
    exit_code: int | None = None
    time: datetime | None = None
    """When the program ended, according to the kubelet; None if the kubelet has not reported a
    time."""
    before_program: bool = False
    """Whether the exit code belongs to an init container. Such an exit code shows nothing about the
    program's configuration.
    """
    rank: int | None = None
    """The rank whose failure made torchrun exit (with `command`), or the slow rank that moves."""


_ENDED_BY_HOST = frozenset({"Evicted", "NodeShutdown", "Shutdown", "Terminated", "Preempting"})
"""Reasons that a kubelet gives when it terminates a running pod."""
_OWN_STORAGE = re.compile(r"exceed(s|ed) .*\blimit\b")
"""Matches the kubelet's messages when it evicts a pod for exceeding the pod's own limit
(pkg/kubelet/eviction/helpers.go). If the host's disk is full, the kubelet writes "The node was low
on resource" instead."""
_REJECTIONS = re.compile(
    r"UnexpectedAdmissionError|OutOf[\w./-]+|TopologyAffinityError|Node(?:Affinity|Ports|Name|Unschedulable)"
    r"|TaintToleration|AppArmor|SysctlForbidden|PodOS\w+"
)
"""Matches the reasons that a kubelet gives when it does not admit a pod
(pkg/kubelet/lifecycle/predicate.go)."""
_LOST_BY_HOST = frozenset({("ContainerStatusUnknown", 137), ("Unknown", 255)})
"""Reasons and exit codes of containers that disappeared when their host was restarted. The first
pair comes from the kubelet, and the second one from containerd."""

Hosts = Mapping[str, HostView] | None


def explain_vanished(name: str, host: str, hosts: Hosts, last: PodView | None = None, *, launcher: bool = True) -> End:
    """Return why a vanished pod has ended, based on the pod's last known state if possible.

    If the last state does not show a reason, the pod was force-deleted, was deleted with its host,
    or lost the labels by which the operator finds its pods. When a pod loses these labels, the
    watch reports a deletion although nobody has requested one.
    """
    if last is not None and (last.disruption or last.status_reason or (last.ended and not last.succeeded)):
        return explain_end(last, hosts, launcher=launcher)
    if is_down(host, hosts):
        return End(Cause.NODE_LOST, f"pod {name} was lost together with its Kubernetes node {host}")
    asked = last is None or last.deleted_at is not None
    return End(Cause.DELETED, f"pod {name} was deleted" + ("" if asked else ", or its labels were removed"))


def explain_end(pod: PodView, hosts: Hosts = None, *, launcher: bool = True) -> End:
    """Return why a pod has failed, is being deleted or was evicted.

    `hosts` is None if the state of hosts is unknown. `launcher` is true if the program is the
    launcher. The launcher's exit codes have defined meanings.
    """
    end = _by_conditions(pod, hosts) or _by_container(pod, launcher=launcher)
    if end.before_program:
        return end
    of_rank = end.rank is not None  # torchrun's own exit code is always 1.
    code = end.exit_code if of_rank else pod.main.exit_code
    return replace(end, exit_code=code, time=pod.main.finished)


def _by_conditions(pod: PodView, hosts: Hosts) -> End | None:
    """Return why a pod has ended, if Kubernetes gives a reason for the pod as a whole.

    Return None if Kubernetes gives no such reason.
    """
    if is_down(pod.host, hosts) and pod.disruption == "DeletionByTaintManager":
        return End(
            Cause.NODE_LOST,
            f"Kubernetes node {pod.host} of pod {pod.name} is lost: {pod.disruption_message or pod.disruption}",
        )
    if pod.disruption:
        cause = _DISRUPTIONS.get(pod.disruption, Cause.DISRUPTION)
        return End(cause, f"pod {pod.name} was disrupted: {pod.disruption_message or pod.disruption}")
    if pod.status_reason == "NodeLost":
        return End(
            Cause.NODE_LOST,
            f"Kubernetes node {pod.host} of pod {pod.name} is lost: {pod.status_message or pod.status_reason}",
        )
    if pod.status_reason == "Evicted" and _OWN_STORAGE.search(pod.status_message):
        return End(
            Cause.STORAGE_EXCEEDED, f"pod {pod.name} used more storage than its limit: {pod.status_message.strip()}"
        )
    if pod.status_reason in _ENDED_BY_HOST:
        return End(
            Cause.EVICTED,
            f"pod {pod.name} was terminated by its Kubernetes node: {pod.status_message or pod.status_reason}",
        )
    if pod.status_reason and (not pod.main.ended or _is_rejected(pod)):
        why = ": ".join(part for part in (pod.status_reason, pod.status_message) if part)
        return End(Cause.NODE_FAULT, f"Kubernetes node {pod.host or '(unknown)'} rejected pod {pod.name}: {why}")
    return None


def _is_rejected(pod: PodView) -> bool:
    """Whether the kubelet rejected the pod.

    After a restart, a kubelet can reject even a running pod. The exit code of such a pod is
    meaningless.
    """
    return bool(_REJECTIONS.fullmatch(pod.status_reason)) or pod.status_message.startswith("Pod was rejected")


def _by_container(pod: PodView, *, launcher: bool) -> End:
    """Return why a pod ended, based on its main container's state, exit code and last message."""
    main = pod.main
    if (main.reason, main.exit_code) in _LOST_BY_HOST:
        why = f"{main.reason}, exit code {main.exit_code}"
        return End(Cause.NODE_FAULT, f"Kubernetes node {pod.host} has lost the container of pod {pod.name} ({why})")
    if main.reason == "OOMKilled":
        return End(
            Cause.OOM_KILLED,
            f"pod {pod.name} used more memory than {memory_limit(pod)} (exit code {main.exit_code})",
        )
    if main.ended and main.reason in _CANNOT_START:
        return End(Cause.START_ERROR, f"the container of pod {pod.name} cannot start: {main.message or main.reason}")
    if main.ended and main.exit_code and _WRONG_PLATFORM.search(main.message):
        return _of_wrong_platform(pod, main.message)
    own = _by_launcher if launcher else _by_rank
    return (own(pod) if main.ended else None) or _by_program(pod)


def memory_limit(pod: PodView | None) -> str:
    """Describe the memory limit that a pod has exceeded: the spec's, or the namespace's default."""
    role = "spec.rendezvous.resources" if pod is not None and pod.role is Role.COORDINATOR else "spec.resources"
    if pod is None or not pod.default_memory:
        return f"{role}.limits.memory allows"
    return f"{pod.default_memory}, the default of the namespace's LimitRange; set {role}.limits.memory"


def _by_rank(pod: PodView) -> End | None:
    """Return why a pod of a `command` job has ended, based on the rank that failed in this pod.

    The rank is known from its own report, or from torchrun's table in the log. Return None if the
    failed rank is unknown.
    """
    if pod.deleted_at is not None or pod.main.exit_code == 0:
        return None
    failed = read_failed_rank(pod.main.message)
    if failed is None:
        return None
    if failed.init:
        message = f"the entry point of pod {pod.name} cannot start: {failed.message}"
        return End(Cause.INIT_FAILURE, message, failed.traceback, failed.exit_code, rank=failed.rank)
    how = _code(failed.exit_code)
    message = f"rank {failed.rank} in pod {pod.name} ended with {how}: {failed.message}".rstrip(": ")
    message += if_shared_memory_full(failed.message)
    return End(Cause.WORKER_FAILED, message, failed.traceback, failed.exit_code, rank=failed.rank)


def _by_launcher(pod: PodView) -> End | None:
    """Return why a pod has ended, based on an exit code that only the launcher uses.

    Return None if the launcher does not use this exit code.
    """
    main = pod.main
    if main.exit_code == EXIT_INIT_FAILURE:
        written = read_termination_message(main)
        return End(
            Cause.INIT_FAILURE,
            f"the entry point of pod {pod.name} cannot start: {written.message}".rstrip(": "),
            written.traceback,
        )
    if main.exit_code == EXIT_RENDEZVOUS_LOST:
        return End(
            Cause.RENDEZVOUS_LOST, read_termination_message(main).message or f"pod {pod.name} lost the rendezvous"
        )
    if main.exit_code == EXIT_FENCED:
        return End(
            Cause.FENCED,
            read_termination_message(main).message or f"pod {pod.name} was fenced: the group has continued without it",
        )
    if main.exit_code == EXIT_UNFIT:
        where = f" on Kubernetes node {pod.host}" if pod.host else ""
        why = read_termination_message(main).message
        return End(Cause.PREFLIGHT_FAILED, f"pod {pod.name}{where} failed the preflight: {why}".rstrip(": "))
    if main.exit_code == EXIT_STOPPED and pod.deleted_at is None:
        return End(Cause.DELETED, f"pod {pod.name} was stopped by the coordinator")
    return None


def _by_program(pod: PodView) -> End:
    main = pod.main
    if pod.deleted_at is not None:
        return End(Cause.DELETED, f"pod {pod.name} was deleted")
    if main.ended:
        written = read_termination_message(main)
        message = f"pod {pod.name} ended with {_code(main.exit_code)}: {written.message or main.reason}".rstrip(": ")
        return End(Cause.EXIT_CODE, message + if_shared_memory_full(written.message), written.traceback)
    return _never_began(pod)


def _code(exit_code: int | None) -> str:
    """Describe the exit code, and name the signal if the code is 128 plus a signal's number."""
    try:
        name = signal.Signals((exit_code or 0) - 128).name
        return f"exit code {exit_code} (128 + {name}{if_shared_memory_full('', name)})"
    except ValueError:
        return f"exit code {exit_code}"


def _never_began(pod: PodView) -> End:
    """Return why a pod has ended without ever running its main container.

    Either an init container failed or the host rejected the pod.
    """
    # Init containers start in order, so the last one that started is the failed one. Sidecars
    # started earlier, and the kubelet stops them later.
    for name, container in reversed(list(pod.init_containers.items())):
        if container.ended and container.exit_code != 0:
            written = read_termination_message(container)
            why = f"init container {name} of pod {pod.name} ended with exit code {container.exit_code}"
            why += f": {written.message or container.reason}"
            cause = Cause.START_ERROR if container.reason in _CANNOT_START else Cause.EXIT_CODE
            if name == CODE_CONTAINER and container.exit_code == EXIT_INIT_FAILURE:
                cause = Cause.INIT_FAILURE  # The repository does not have the commit.
            return End(
                Cause.OOM_KILLED if container.reason == "OOMKilled" else cause,
                why.rstrip(": "),
                written.traceback,
                exit_code=container.exit_code,
                before_program=True,
            )
    reason = pod.status_message or "no reason given"
    return End(Cause.NODE_FAULT, f"pod {pod.name} failed before its program ran: {reason}")


def names_entry_point(end: End, command: tuple[str, ...]) -> bool:
    """Whether a START_ERROR means that the job's own program is missing.

    An example is the message `exec: "python3": executable file not found`. A container runtime's
    message may also name a program that belongs to the host, such as a GPU hook.
    """
    programs = (path.rpartition("/")[2] for path in _QUOTED.findall(end.message))
    wanted = command[0].rpartition("/")[2] if command else "python"
    return any(program == wanted if command else program.startswith(wanted) for program in programs)


_QUOTED = re.compile(r"""["']([^"']+)["']""")


@dataclass(frozen=True)
class TerminationMessage:
    """A container's last message before it ended."""

    message: str
    traceback: str


def read_termination_message(container: ContainerView) -> TerminationMessage:
    """Read a termination message: JSON from the launcher, or the last lines of the log.

    In a log, the launcher's and the coordinator's own lines report earlier events, such as the
    failure of another pod. These lines and the output before them are ignored.
    """
    text = container.message.strip()
    try:
        written = json.loads(text)
    except (ValueError, RecursionError):
        lines = text.splitlines()
        own = [number for number, line in enumerate(lines, 1) if OWN_LOG_LINE.match(line)]
        lines = lines[own[-1] :] if own else lines
        return TerminationMessage(lines[-1] if lines else "", "\n".join(lines) if len(lines) > 1 else "")
    if not isinstance(written, dict):
        return TerminationMessage(text, "")
    return TerminationMessage(*(escaped(str(written.get(part) or "")) for part in ("message", "traceback")))


@dataclass(frozen=True)
class FailedRank:
    """The rank whose failure made torchrun exit, in a job with `command`.

    `exit_code` is 128 + N for signal N, as in a shell. `init` is true if the rank could not start.
    A retry would not help such a rank.
    """

    rank: int
    exit_code: int
    message: str = ""
    traceback: str = ""
    init: bool = False


_ROOT_CAUSE = re.compile(r"Root Cause \(first observed failure\):")
_OF_TABLE = {name: re.compile(rf"^ *{name} *: (-?[0-9]{{1,6}})\b", re.MULTILINE) for name in ("rank", "exitcode")}
"""Matches the lines of torchrun's table of failures. A rank that was terminated by a signal could
not write a report, so only this table names the rank."""


def read_failed_rank(text: str) -> FailedRank | None:
    """Read the failed rank from a rank's report (worker.py), or from torchrun's table in the log.

    Return None if the text contains neither.
    """
    try:
        written = json.loads(text)
    except (ValueError, RecursionError):
        return _rank_of_table(text)
    if not isinstance(written, dict) or written.get("kind") != RANK_FAILURE:
        return None
    rank, code = written.get("rank"), written.get("exitCode")
    if not (_is_count(rank, 1 << 20) and _is_count(code, 255)):
        return None
    said, trace = (escaped(str(written.get(part) or "")) for part in ("message", "traceback"))
    return FailedRank(rank, code, said, trace, written.get("init") is True)


def _is_count(value: object, most: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _rank_of_table(text: str) -> FailedRank | None:
    root = _ROOT_CAUSE.search(text)
    if root is None:
        return None
    rank, code = (pattern.search(text, root.end()) for pattern in _OF_TABLE.values())
    if rank is None or code is None or int(rank[1]) < 0:
        return None
    value = int(code[1])
    return FailedRank(int(rank[1]), value if value >= 0 else 128 - value, traceback=text)


_NO_SUCH_IMAGE = re.compile(
    r"failed to resolve (?:reference|image)\b.*: not found\W*$|manifest unknown|invalid reference",
    re.IGNORECASE | re.DOTALL,
)
"""Matches a registry's response that the image does not exist. A job does not wait for such an
image, but it waits if a registry denies access or limits the rate. The words "not found" alone
prove nothing, because they also end many of containerd's other errors, for example if a mirror
lacks a layer."""
_WRONG_PLATFORM = re.compile(
    r"no match for platform|no matching manifest for|no image found in (?:manifest list|image index)|exec format error"
    r"|cannot be used on this platform",
    re.IGNORECASE,
)
"""Matches messages from containerd, docker, CRI-O and the kernel about an image that does not fit
the host's architecture or operating system."""
PULLING = ("ErrImagePull", "ImagePullBackOff")
"""The two reasons that alternate while a kubelet cannot pull an image."""
_CANNOT_START = ("RunContainerError", "StartError", "ContainerCannotRun")


def find_wrong_platform(pod: PodView) -> End | None:
    """Return why a pod cannot run if its image is built for a platform other than the host's.

    Return None if the image fits the platform.
    """
    waiting = [c.waiting_message for c in (*pod.init_containers.values(), *pod.containers.values()) if c.waiting_reason]
    found = next((message for message in waiting if _WRONG_PLATFORM.search(message)), None)
    return _of_wrong_platform(pod, found) if found is not None else None


def is_about_platform(end: End) -> bool:
    """Whether a START_ERROR is due to an image that does not fit the host.

    Hosts with a different architecture may be able to run the image.
    """
    return _WRONG_PLATFORM.search(end.message) is not None


def _of_wrong_platform(pod: PodView, said: str) -> End:
    last = said.strip().splitlines()[-1][-_LONGEST_WORDS:]
    host = pod.host or "(unknown)"
    why = (
        f"the image of pod {pod.name} was not built for the architecture or operating system of Kubernetes node {host}"
    )
    return End(Cause.START_ERROR, f"{why}: {last}")


_LONGEST_WORDS = 300


@dataclass(frozen=True)
class Stuck:
    """A container that does not start."""

    reason: str
    message: str
    final: bool
    """Whether the fault is permanent, so that the job fails instead of waiting."""


def find_stuck(pod: PodView, *, has_run: bool) -> Stuck | None:
    """Return the first container of the pod that cannot start yet; None if there is none.

    Only two faults are final, and only for a job that has never run a pod: an invalid image name,
    and a registry that does not have the image. The job waits if a registry is unreachable, denies
    access or limits the rate. It also waits if the host lacks an image that may not be pulled.
    """
    preparing = {} if pod.main.running or pod.main.ended else pod.init_containers
    for name, container in [*preparing.items(), *pod.containers.items()]:
        reason = container.waiting_reason
        if reason in ("", "ContainerCreating", "PodInitializing"):
            continue
        message = f"container {name} of pod {pod.name}: {reason}: {container.waiting_message}".rstrip(": ")
        said = container.waiting_message
        absent = reason in PULLING and bool(_NO_SUCH_IMAGE.search(said)) and not _WRONG_PLATFORM.search(said)
        return Stuck(reason, message, final=not has_run and (absent or reason == "InvalidImageName"))
    return None

"""Decides why a pod of the job ended, from the pod and its node. Whether that counts is decided in `rules`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

from ddpjob.core.hosts import HostView
from ddpjob.core.world import ContainerView, PodView, Role

EXIT_INIT_FAILURE = 78
EXIT_RENDEZVOUS_LOST = 76
EXIT_STOPPED = 77
EXIT_FENCED = 79


class Cause(StrEnum):
    """Reasons as users read them in `status.restarts.recent` and in conditions."""

    WORKER_FAILED = "WorkerFailed"
    EXIT_CODE = "ExitCode"
    OOM_KILLED = "OOMKilled"
    DISRUPTION = "Disruption"
    PREEMPTED = "Preempted"
    EVICTED = "Evicted"
    DELETED = "Deleted"
    NODE_LOST = "NodeLost"
    HANG = "Hang"
    INIT_FAILURE = "InitFailure"
    RENDEZVOUS_LOST = "RendezvousLost"
    FENCED = "Fenced"
    COORDINATOR_LOST = "CoordinatorLost"
    SCALED = "Scaled"
    JOINED = "Joined"
    SPEC_CHANGED = "SpecChanged"
    KEY_CHANGED = "KeyChanged"


_DISRUPTIONS = {
    "PreemptionByScheduler": Cause.PREEMPTED,
    "EvictionByEvictionAPI": Cause.EVICTED,
    "TerminationByKubelet": Cause.EVICTED,
    "DeletionByTaintManager": Cause.DISRUPTION,
    "DeletionByPodGC": Cause.NODE_LOST,
}


@dataclass(frozen=True)
class End:
    """Why a pod is no longer of use."""

    cause: Cause
    message: str
    traceback: str = ""
    exit_code: int | None = None
    time: datetime | None = None
    """When its program ended, where the kubelet has told."""


Hosts = Mapping[str, HostView] | None


def is_down(node: str, hosts: Hosts) -> bool:
    """Whether a Kubernetes node is known to be away: its object is deleted, or it is not ready."""
    if hosts is None or not node:
        return False
    return node not in hosts or not hosts[node].ready


def vanished(name: str, node: str, hosts: Hosts) -> End:
    """A pod that was there and is not: deleted by force, or with its node."""
    if is_down(node, hosts):
        return End(Cause.NODE_LOST, f"pod {name} is gone with its node {node}")
    return End(Cause.DELETED, f"pod {name} was deleted")


def why_ended(pod: PodView, hosts: Hosts = None) -> End:
    """For a pod that failed, is being deleted or was evicted.

    The pod's own conditions come before exit codes: a container ended by an eviction has an exit code too.
    """
    return replace(_why_ended(pod, hosts), exit_code=pod.main.exit_code, time=pod.main.finished)


def _why_ended(pod: PodView, hosts: Hosts) -> End:
    if is_down(pod.node, hosts) and pod.disruption == "DeletionByTaintManager":
        return End(Cause.NODE_LOST, f"node {pod.node} of pod {pod.name} is lost: {pod.disruption_message or pod.disruption}")
    if pod.disruption:
        cause = _DISRUPTIONS.get(pod.disruption, Cause.DISRUPTION)
        return End(cause, f"pod {pod.name} was disrupted: {pod.disruption_message or pod.disruption}")
    if pod.status_reason == "NodeLost":
        return End(Cause.NODE_LOST, f"node {pod.node} of pod {pod.name} is lost: {pod.status_message or pod.status_reason}")
    if pod.status_reason in ("Evicted", "NodeShutdown", "Shutdown", "Terminated", "NodeAffinity", "Preempting"):
        return End(Cause.EVICTED, f"pod {pod.name} was ended by its node: {pod.status_message or pod.status_reason}")
    main = pod.main
    if main.reason == "OOMKilled":
        limit = "spec.rendezvous.resources.limits.memory" if pod.role is Role.COORDINATOR else "spec.resources.limits.memory"
        return End(Cause.OOM_KILLED, f"pod {pod.name} used more memory than {limit} allows (exit code {main.exit_code})")
    if main.ended and main.reason in _CANNOT_START:
        return End(Cause.INIT_FAILURE, f"the container of pod {pod.name} cannot start: {main.message or main.reason}")
    if main.ended and main.exit_code == EXIT_INIT_FAILURE:
        told = told_by(main)
        return End(Cause.INIT_FAILURE, f"the entry point of pod {pod.name} cannot start: {told.message}".rstrip(": "), told.traceback)
    if main.ended and main.exit_code == EXIT_RENDEZVOUS_LOST:
        return End(Cause.RENDEZVOUS_LOST, told_by(main).message or f"pod {pod.name} lost the rendezvous")
    if main.ended and main.exit_code == EXIT_FENCED:
        return End(Cause.FENCED, told_by(main).message or f"pod {pod.name} was too late: the group had gone on without it")
    if pod.deleted_at is not None or main.exit_code == EXIT_STOPPED:
        return End(Cause.DELETED, f"pod {pod.name} was deleted")
    if main.ended:
        told = told_by(main)
        return End(
            Cause.EXIT_CODE,
            f"pod {pod.name} ended with exit code {main.exit_code}: {told.message or main.reason}".rstrip(": "),
            told.traceback,
        )
    return _never_began(pod)


def _never_began(pod: PodView) -> End:
    """A pod that failed without its deciding container: an init container did, or the node did not take it."""
    for name, container in pod.init_containers.items():
        if container.ended and container.exit_code != 0:
            told = told_by(container)
            why = f"init container {name} of pod {pod.name} ended with exit code {container.exit_code}: {told.message or container.reason}"
            return End(Cause.INIT_FAILURE if container.reason in _CANNOT_START else Cause.EXIT_CODE, why.rstrip(": "), told.traceback)
    reason = pod.status_message or pod.status_reason or "no reason given"
    return End(Cause.EXIT_CODE, f"pod {pod.name} failed: {reason}")


@dataclass(frozen=True)
class Told:
    message: str
    traceback: str


def told_by(container: ContainerView) -> Told:
    """The termination message: the launcher writes JSON, any other program its last lines."""
    text = container.message.strip()
    try:
        told = json.loads(text)
    except ValueError:
        lines = text.splitlines()
        return Told(lines[-1] if lines else "", text if len(lines) > 1 else "")
    if not isinstance(told, dict):
        return Told(text, "")
    return Told(str(told.get("message") or ""), str(told.get("traceback") or ""))


# The registry answered, and the answer will not change by itself.
_FINAL_PULL_ERRORS = (
    "not found",
    "manifest unknown",
    "does not exist",
    "unauthorized",
    "authentication required",
    "access denied",
    "forbidden",
    "denied:",
)
_PULLING = ("ErrImagePull", "ImagePullBackOff")
_CANNOT_START = ("InvalidImageName", "ErrImageNeverPull", "RunContainerError", "StartError", "ContainerCannotRun")


@dataclass(frozen=True)
class Stuck:
    """A container that does not start."""

    reason: str
    message: str
    final: bool


def stuck(pod: PodView, *, has_run: bool) -> Stuck | None:
    """Whether a pod's container waits for something that will not come, or may not.

    A registry may be away for a while: a job that has run before waits for it, a job that never ran and is
    backing off already (`ImagePullBackOff`) has a wrong image or no way to it and fails.
    """
    preparing = {} if pod.main.running or pod.main.ended else pod.init_containers
    for name, container in [*preparing.items(), *pod.containers.items()]:
        reason = container.waiting_reason
        if reason in ("", "ContainerCreating", "PodInitializing"):
            continue
        message = f"container {name} of pod {pod.name}: {reason}: {container.waiting_message}".rstrip(": ")
        if reason in _CANNOT_START:
            return Stuck(reason, message, final=not has_run)
        if reason in _PULLING:
            answered = any(text in container.waiting_message.lower() for text in _FINAL_PULL_ERRORS)
            return Stuck(reason, message, final=not has_run and (answered or reason == "ImagePullBackOff"))
        return Stuck(reason, message, final=False)
    return None

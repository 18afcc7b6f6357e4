"""What a reconcile knows when it decides: a job, its status, the observed objects and the time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import Any, TypeGuard

from ddpjob_runtime.protocol import Report

from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import Placement
from ddpjob.api.job_status import JobStatus, Slot, SlotState
from ddpjob.core.volumes import Unusable, find_unusable_claim
from ddpjob.core.world import PodView, World, coordinator_pod_name, node_pod_name


@dataclass(frozen=True)
class View:
    """An immutable view of a job that computes each derived value only once.

    A stage that changes the status continues with the view that `with_status` returns.
    """

    job: DDPJob
    status: JobStatus
    world: World
    now: datetime

    def with_status(self, status: JobStatus) -> View:
        """Return a view of the same job, world and time with a changed status.

        If the status object is the same, return this view.
        """
        if status is self.status:
            return self
        view = View(self.job, status, self.world, self.now)
        if status.slots is self.status.slots:
            # Large jobs have many slots, so reuse the pods that this view has already looked up.
            kept = ("pods",) + (("current_names",) if status.rendezvous is self.status.rendezvous else ())
            view.__dict__.update({name: self.__dict__[name] for name in kept if name in self.__dict__})
        return view

    def with_slots(self, slots: list[Slot]) -> View:
        """Return the view with changed slots, or the same view if no slot has changed."""
        old = self.status.slots
        if len(old) == len(slots) and all(a is b for a, b in zip(old, slots, strict=True)):
            return self
        return self.with_status(replace(self.status, slots=tuple(slots)))

    @cached_property
    def pods(self) -> tuple[PodView | None, ...]:
        """The pods of the slots' current attempts, in slot order. None stands for a missing pod."""
        by_name = self.world.nodes_by_name
        return tuple(by_name.get(node_pod_name(self.job, i, slot.attempt)) for i, slot in enumerate(self.status.slots))

    @cached_property
    def coordinator(self) -> PodView | None:
        """The pod of the current coordinator. With Master placement, this is the pod of slot 0."""
        rendezvous = self.status.rendezvous
        if self.job.spec.rendezvous.placement is Placement.MASTER:
            name = node_pod_name(self.job, 0, self.status.slots[0].attempt) if self.status.slots else ""
        else:
            name = coordinator_pod_name(self.job, rendezvous.generation, rendezvous.attempt)
        return next((p for p in self.world.pods if p.name == name), None)

    @cached_property
    def current_names(self) -> frozenset[str]:
        """Names of the pods that should exist: the pods of all slots, and the coordinator's pod."""
        rendezvous = self.status.rendezvous
        names = {node_pod_name(self.job, i, s.attempt) for i, s in enumerate(self.status.slots)}
        return frozenset(names | {coordinator_pod_name(self.job, rendezvous.generation, rendezvous.attempt)})

    @cached_property
    def report(self) -> Report | None:
        """The coordinator's report, if it belongs to the current generation."""
        report = self.world.report
        return report if report is not None and report.generation == self.status.rendezvous.generation else None

    @cached_property
    def reported_progress(self) -> dict[str, Any]:
        """Progress from the last report, whatever its generation; empty if there is no report."""
        return self.world.report.progress if self.world.report is not None else {}

    @cached_property
    def claim_problem(self) -> Unusable | None:
        """Why the job's claims cannot serve its pods; None if they can."""
        return find_unusable_claim(self.job, self.world)

    @cached_property
    def has_run(self) -> bool:
        """Whether a program may already have run in any of the job's pods."""
        status = self.status
        began = any(s.state not in (SlotState.PLANNED, SlotState.CREATED) for s in status.slots)
        return bool(status.slots) and (began or status.round > 0 or status.rendezvous.generation > 0)

    @cached_property
    def trained(self) -> bool:
        """Whether the job has ever completed a step, according to its status or last report."""
        if self.status.trained:
            return True
        known = (self.status.progress, self.reported_progress)
        values = (progress.get(name) for progress in known for name in ("step", "epoch", "percent"))
        return any(is_number(value) and value > 0 for value in values)


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a reported value is a finite number. A boolean does not count as a number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")

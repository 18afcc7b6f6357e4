"""Merges the logs of a job's pods, including replacement pods, into one stream of lines."""

from __future__ import annotations

import contextlib
import queue
import re
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ddpjob.api.job_spec import Json
from ddpjob.api.job_status import ConditionType, JobStatus, SlotState
from ddpjob.client.backends.backend import (
    Backend,
    EndedLogs,
    LogOptions,
    Mistake,
    NoSuchJob,
    OutagePatience,
    PodLine,
)

MOST_PODS = 200
"""Maximum number of logs that are read at the same time."""
_QUEUE = 10_000
"""Maximum number of lines that have been read, but that `lines` has not yielded yet."""
_QUEUE_OF_MANY = 500
"""Replaces _QUEUE if the reader passes an event as `LogOptions.stop`. The number is smaller,
because such a reader's process, for example the dashboard, can read many logs at once."""
_POLL = 1.0
_NOT_STARTED = ("Pending", "ContainerCreating", "PodInitializing", "Unschedulable", "ErrImagePull", "ImagePullBackOff")
_NO_GROUP_KNOWN = ("CoordinatorUnreachable", "CoordinatorReplaced", "GroupFinished")
"""If the Running condition has one of these reasons, the number of nodes in the group is
unknown."""
_TAG = re.compile(rb"\[(default|rank)(\d+)\]:")
"""Matches a prefix that shows which rank wrote a line. torchrun's --tee writes the local rank, and
PyTorch's messages contain the global rank."""


def ranks_per_node(body: Json) -> int:
    """Return the number of ranks per node.

    If the job runs a `command`, the number is 0, because the command's processes have no known
    ranks.
    """
    spec = body.get("spec") or {}
    if spec.get("command"):
        return 0
    return int(spec.get("procsPerNode") or max(int(spec.get("gpusPerNode") or 0), 1))


def ranks_of_pods(pods: Sequence[PodLine], body: Json, known: Mapping[str, range] | None = None) -> dict[str, range]:
    """Return the global ranks of each pod that trains or has trained. Spares have no ranks.

    Ranks are numbered in the status's rank order or, if that order does not fit the pods, in slot
    order. The ranks change only when the status in `body` shows that a new group has formed. Until
    then, each slot keeps its ranks from `known`, which is the previous result. A slot that is not
    in `known` gets the ranks that it would have if all slots trained, including slots whose pods
    have ended.
    """
    per_node = ranks_per_node(body)
    status = JobStatus.read(body.get("status") or {})
    nodes = [pod for pod in newest_pods(pods) if pod.role == "node"]
    group = [pod for pod in nodes if pod.state in ("Running", "Completed")]
    held = {_slot(name): ranks for name, ranks in (known or {}).items()}
    if len(group) == _nodes_of_group(status):
        nodes, held = group, {}
    return {
        pod.name: held.get(_slot(pod.name), range(at * per_node, (at + 1) * per_node))
        for at, pod in enumerate(_by_rank(nodes, status))
        if pod.state in ("Running", "Terminating") or pod.ended
    }


def _by_rank(nodes: list[PodLine], status: JobStatus) -> list[PodLine]:
    """Return `nodes` in the rank order that the status contains.

    If this order does not contain exactly the indices of `nodes`, return `nodes` unchanged, in the
    order of their indices.
    """
    places = {index: place for place, index in enumerate(status.rank_order)}
    if {pod.index for pod in nodes} != places.keys():
        return nodes
    return sorted(nodes, key=lambda pod: places.get(pod.index or 0, 0))


def _nodes_of_group(status: JobStatus) -> int | None:
    """Return the number of nodes in the current group, including nodes that have finished.

    If no group has formed, or if the status does not show this number, return None.
    """
    running = status.condition(ConditionType.RUNNING)
    formed = running is not None and running.status and running.reason not in _NO_GROUP_KNOWN
    if not formed and not status.holds(ConditionType.COMPLETE):
        return None
    return status.ready + sum(slot.state is SlotState.SUCCEEDED for slot in status.slots)


def _slot(pod: str) -> str:
    """Return the part of a pod's name that all pods of its slot have in common."""
    return pod.rpartition("-")[0]


def newest_pods(pods: Sequence[PodLine]) -> list[PodLine]:
    """Return the newest pod of each slot, in slot order."""
    newest = {pod.index: pod for pod in sorted(pods, key=_attempt) if pod.index is not None}
    return [newest[index] for index in sorted(newest)]


def _attempt(pod: PodLine) -> int:
    words = pod.name.rpartition("-")[2]
    return int(words) if words.isdigit() else 0


def rank_of_line(line: bytes, ranks: range) -> int | None:
    """Return the global rank that wrote a line in a pod's log; None if it is unknown.

    `ranks` are all ranks in this pod.
    """
    if len(ranks) == 1:
        return ranks[0]
    if (tag := _TAG.match(line)) is None or len(tag[2]) > 9:
        return None
    rank = int(tag[2]) + (ranks.start if tag[1] == b"default" else 0)
    return rank if rank in ranks else None


@dataclass(frozen=True)
class Chosen:
    """Which logs to read: the log of one pod, or the logs of training pods and coordinators.

    By default, the logs of all training pods are read, but not the logs of coordinators.
    """

    pod: str = ""
    indices: Collection[int] = ()
    ranks: Collection[int] = ()
    """Global ranks. Only the logs of pods with these ranks are read, without lines that are known
    to come from other ranks."""
    coordinator: bool = False
    kept: EndedLogs | None = None
    """The job's kept logs. If this field is set, the log of `pod` is read from them."""


@dataclass(frozen=True)
class LogLine:
    """A line from a pod's log. `ranks` are the ranks of the pod when the line was yielded."""

    pod: PodLine
    text: bytes
    ranks: range
    rank: int | None
    """The rank that wrote the line; None if it is unknown."""


_ALL = Chosen()


def last_state(line: bytes) -> bytes:
    """Return the last state of a progress bar.

    Any other line is returned unchanged. The last state follows the last carriage return. In a
    terminal, each state overwrites the previous state.
    """
    return line[line.rstrip(b"\r").rfind(b"\r") + 1 :]


def _shortened(line: bytes, limit: int) -> bytes:
    """Shorten a line to `limit` bytes. A progress bar is first reduced to its last state."""
    return line if len(line) <= limit else last_state(line)[:limit]


class LogFollower:
    """Reads the logs of the chosen pods. `lines()` yields the lines of these logs.

    With `options.follow`, `lines()` continues until the job has finished.
    """

    def __init__(self, backend: Backend, body: Json, options: LogOptions, chosen: Chosen = _ALL) -> None:
        """Prepare to read the logs of the job whose current object is `body`.

        Raises Mistake if the caller has chosen ranks and the job has no ranks.
        """
        self.job: str = body["metadata"]["name"]
        if chosen.ranks and not ranks_per_node(body):
            raise Mistake(f"rank: {self.job} runs a command, not torchrun, so it has no ranks; choose pods by index")
        self.backend, self._chosen, self._body = backend, chosen, body
        self.options = replace(options, follow=options.follow and chosen.kept is None)
        self.ranks: dict[str, range] = {}
        """Maps each training pod to the ranks that it had when the pods were last listed. A pod
        that is no longer running keeps its last ranks."""
        self.notes: list[str] = []
        """Notes for the user about logs that could not be read."""
        self.seen: set[str] = set()
        """Pods from which a line has been read."""
        self._lines: queue.Queue[tuple[PodLine, bytes | None]] = queue.Queue(
            _QUEUE if options.stop is None else _QUEUE_OF_MANY
        )
        """Lines that have been read, as pairs (pod, line). None in place of a line marks the end of
        the pod's log."""
        self._begun: set[str] = set()
        """Pods whose log is being read or has been read."""
        self._reading = 0
        """Number of logs whose end marker has not been taken from the queue yet."""

    def lines(self) -> Iterator[LogLine]:
        """Yield lines as they arrive. The lines of one pod stay in order."""
        for pod, text in self._all_lines():
            self.seen.add(pod.name)
            ranks = self.ranks.get(pod.name, range(0))
            rank = rank_of_line(text, ranks)
            by = ranks if rank is None else (rank,)
            if not self._chosen.ranks or pod.index is None or any(number in self._chosen.ranks for number in by):
                yield LogLine(pod, text, ranks, rank)

    def _all_lines(self) -> Iterator[tuple[PodLine, bytes]]:
        patience, looked, gone = OutagePatience(), False, 0
        while not self.options.stopped:
            over, pods = False, list[PodLine]()
            try:
                over, pods = self._is_over(), self._pods()
                patience.answered()
                # On this machine, a pod can have a log before it is listed. A pod therefore counts
                # as gone only if two lists in a row do not show it running.
                gone = gone + 1 if self._chosen.pod in self._begun and all(pod.ended for pod in pods) else 0
            except Mistake as mistake:
                if not self.options.follow:
                    raise
                patience.tolerate(mistake)
            for pod in pods:
                if pod.name not in self._begun and pod.state not in _NOT_STARTED:
                    # `tail` applies only to the pods in the first list. If a pod appears later, its
                    # log is read from the beginning.
                    self._start(pod, replace(self.options, tail=None) if looked else self.options)
            looked = looked or bool(pods)
            deadline, quiet = time.monotonic() + _POLL, True
            while (left := deadline - time.monotonic()) > 0 and (self._reading or not over):
                try:
                    pod, text = self._lines.get(timeout=left)
                except queue.Empty:
                    break
                if text is not None:
                    quiet = False
                    yield pod, text
                    continue
                self._reading -= 1
                if not self._reading:
                    break
            if (over or gone > 1) and not self._reading:
                return
            # Do not wait for the end of a log on this machine, because such a log ends only when
            # the job's run ends.
            if gone > 1 and quiet and self.backend.local:
                return

    def _pods(self) -> list[PodLine]:
        if (kept := self._chosen.kept) is not None:
            return [pod for pod in kept.pods() if pod.name == self._chosen.pod]
        try:
            every = self.backend.pods(self.job)
        except NoSuchJob:
            return []
        # A pod that has ended or is about to end keeps its ranks, because its last lines can still
        # arrive.
        running = {pod.name for pod in every if pod.state == "Running"}
        gone = {name: ranks for name, ranks in self.ranks.items() if name not in running}
        self.ranks = gone | ranks_of_pods(every, self._body, self.ranks)
        pods = [pod for pod in every if self._wanted(pod)]
        if len(pods) > MOST_PODS:
            raise Mistake(
                f"at most {MOST_PODS} of {len(pods)} pods can be read at once; choose pods with --index N, or name one "
                "POD"
            )
        return pods

    def _wanted(self, pod: PodLine) -> bool:
        chosen = self._chosen
        if chosen.pod:
            return pod.name == chosen.pod
        if pod.index is None:
            return chosen.coordinator
        return (not chosen.indices or pod.index in chosen.indices) and (
            not chosen.ranks or any(number in chosen.ranks for number in self.ranks.get(pod.name, ()))
        )

    def why_nothing(self) -> str:
        """Explain why no line was read.

        The text is empty if lines were read, or if the notes already contain the reason.
        """
        if self.seen or self.notes:
            return ""
        if self._chosen.ranks:
            held = sorted(number for ranks in self.ranks.values() for number in (ranks[0], ranks[-1]))
            there = f"the ranks are {held[0]} to {held[-1]}" if held else "no pod has a rank yet"
            wanted = ", ".join(map(str, self._chosen.ranks))
            if any(rank in ranks for ranks in self.ranks.values() for rank in self._chosen.ranks):
                return f"rank {wanted} of {self.job} has written nothing"
            return f"{self.job} has no rank {wanted}; {there}"
        every = self.backend.pods(self.job)
        if missing := self._missing_slots(every):
            return missing
        pods = [pod for pod in every if self._wanted(pod)][:5]
        found = "nothing was printed" if pods and all(pod.ended for pod in pods) else "no logs yet"
        return f"{found}: {', '.join(f'{pod.name} is {pod.state}' for pod in pods) or 'no pods'}"

    def missing_slots(self) -> str:
        """Return a message if none of the requested slots has a pod.

        Otherwise, or if the job has no pods at all, the message is empty.
        """
        return self._missing_slots(self.backend.pods(self.job)) if self._chosen.indices else ""

    def _missing_slots(self, every: Sequence[PodLine]) -> str:
        if not every or not self._chosen.indices or any(self._wanted(pod) for pod in every):
            return ""
        slots = sorted({pod.index for pod in every if pod.index is not None})
        there = f"the slots are {slots[0]} to {slots[-1]}" if slots else "no slot has a pod yet"
        return f"{self.job} has no pod in slot {', '.join(map(str, self._chosen.indices))}; {there}"

    def _is_over(self) -> bool:
        if not self.options.follow:
            return True
        try:
            self._body = self.backend.job(self.job)
        except NoSuchJob:
            return True
        status = self._body.get("status") or {}
        return JobStatus.read(status).terminal or status.get("phase") == "Interrupted"

    def _start(self, pod: PodLine, options: LogOptions) -> None:
        self._begun.add(pod.name)
        self._reading += 1
        threading.Thread(target=self._read_all, args=(pod, options), name=f"log of {pod.name}", daemon=True).start()

    def _read_all(self, pod: PodLine, options: LogOptions) -> None:
        try:
            self._read(pod, options)
        finally:
            self._put(pod, None)

    def _read(self, pod: PodLine, options: LogOptions) -> None:
        rest, limit, cut = b"", options.line_bytes, False
        try:
            kept = self._chosen.kept
            for piece in self.backend.log(pod, options) if kept is None else [kept.text(pod.name, options)]:
                lines = (rest + piece).split(b"\n")
                cut = cut or any(len(line) > limit for line in lines)
                *whole, rest = (_shortened(line, limit) for line in lines)
                for line in whole:
                    self._put(pod, line)
        except Mistake as mistake:
            # The words "is waiting to start" come from the kubelet.
            never_started = pod.ended and "is waiting to start" in str(mistake)
            why = (
                f"its program never started; run `ddpjob why {self.job}` to see what failed"
                if never_started
                else mistake
            )
            self.notes.append(f"pod {pod.name}: {why}")
        if rest:
            self._put(pod, rest)
        if cut:
            self.notes.append(f"pod {pod.name}: lines longer than {limit:,} bytes were truncated")

    def _put(self, pod: PodLine, line: bytes | None) -> None:
        while not self.options.stopped:
            with contextlib.suppress(queue.Full):
                self._lines.put((pod, line), timeout=_POLL)
                return

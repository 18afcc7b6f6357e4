"""Reads and changes a cluster's jobs through the API server, with the user's permissions."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import quote

from ddpjob_runtime.protocol import LOGS_FOLDER

from ddpjob.api.job import API_VERSION, KIND, PLURAL
from ddpjob.api.job_spec import Json, oversized, without_large_fields
from ddpjob.api.job_status import parse_time
from ddpjob.client.backends.api_server import MERGE_PATCH, AnswerTooLarge, ApiRefusal, ApiServer
from ddpjob.client.backends.backend import (
    LINE_BYTES,
    METRICS,
    METRICS_BYTES,
    METRICS_WRITERS,
    SILENCE_SECONDS,
    Happened,
    LogOptions,
    Mistake,
    NoAnswer,
    NoSuchJob,
    OutagePatience,
    PodLine,
)
from ddpjob.client.backends.kept_logs import KeptLogs, in_bucket, in_pod
from ddpjob.client.texts.run_record import with_commit
from ddpjob.controller.pod_views import read_pod
from ddpjob.core.failures.classify import find_stuck, read_termination_message
from ddpjob.core.status.waiting_pods import SCHEDULING_GATED
from ddpjob.core.world import (
    COORDINATOR_CONTAINER,
    LABEL_JOB,
    LABEL_MANAGED,
    LABEL_UID,
    MANAGED_BY,
    TRAINER_CONTAINER,
    PodView,
    Role,
)

_WATCH_SECONDS = 240
_RETRY_SECONDS = 2.0
_LEAVING_SECONDS = 30.0
_WAITING_TO_START = 400
"""HTTP status of the response to a request for the log of a container that has not started yet."""
_PREPARED = ("ContainerCreating", "PodInitializing")
"""States of a pod whose containers do not report their own state yet."""
_WARNED_PODS = 3
"""Maximum number of starting pods whose events are read to find out what the pods are waiting for.
Other starting pods are usually waiting for the same reasons."""
_EXEC_SECONDS = 60.0
MOST_OUTPUT = 16 << 20
"""Maximum size, in bytes, of the output of a command in a pod. The limit is twice METRICS_BYTES."""
_PRINTED = (b"\x01", b"\x02")
"""WebSocket channels for standard output and standard error."""
_CHANGES = ("ADDED", "MODIFIED", "DELETED")
_METRICS_PODS = 4
"""Maximum number of pods that are searched for the metrics or the kept logs."""
_METRICS_SECONDS = 60.0
"""A search for the metrics or the kept logs tries no more pods after this many seconds."""
_METRICS_MARK = "metrics of this run:\n"
_METRICS_PROBE = f"""
import os
path = os.path.join(os.environ.get("DDPJOB_CHECKPOINT_DIR", ""), {METRICS!r})
if os.path.isfile(path):
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - {METRICS_BYTES}))
        print({_METRICS_MARK!r} + file.read({METRICS_BYTES}).decode("utf-8", "replace"))
"""
"""Python code that runs in a pod. If the pod has a metrics file, the code prints a marker, followed
by the end of the file."""


class ClusterBackend:
    """Implements `Backend` for a cluster.

    If `namespace` is None, the namespace in the kubeconfig's context is used. With `everywhere`,
    the jobs in all namespaces are listed.
    """

    local = False

    def __init__(self, api: ApiServer, namespace: str | None = None, *, everywhere: bool = False) -> None:
        self.api, self.everywhere = api, everywhere
        self.namespace = namespace or api.namespace
        self.notes: list[str] = []
        self.whole = False

    @property
    def where(self) -> str:
        place = "all namespaces" if self.everywhere else f"namespace {self.namespace}"
        return f"{place}, context {self.api.context}"

    def path(self, plural: str, name: str | None = None, *, everywhere: bool = False) -> str:
        """Return the URL path of an object in the namespace, or of a whole collection.

        `plural` is `ddpjobs` or a resource of the core API, such as `pods`. If `name` is None, the
        path is that of the collection. Raises Mistake if `name` is not a valid object name. For
        example, a name is empty if it comes from an unset shell variable. An empty name would turn
        a request to delete one job into a request to delete all jobs.
        """
        if name is not None and (name in ("", ".", "..") or "/" in name or "%" in name):
            raise Mistake(f"{name!r} is not a valid object name")
        root = f"/apis/{API_VERSION}" if plural == PLURAL else "/api/v1"
        scope = "" if everywhere else f"/namespaces/{quote(self.namespace, safe='')}"
        return f"{root}{scope}/{plural}" + (f"/{quote(name, safe='')}" if name is not None else "")

    # --- reading

    def jobs(self) -> list[Json]:
        path = self.path(PLURAL, everywhere=self.everywhere)
        with self._explaining():
            listed, _ = self.api.listing(path, shape=self._shaped)
        return sorted(listed, key=lambda job: str(job["metadata"].get("creationTimestamp")))

    def _shaped(self, job: Json) -> Json:
        """Return the job. Unless `whole` is set, omit the large fields of an oversized spec."""
        spec = job.get("spec") or {}
        small = {} if self.whole or not oversized(spec) else {"spec": without_large_fields(spec)}
        return _typed({**job, **small})

    def _shaped_event(self, event: Json) -> Json:
        if event.get("type") not in _CHANGES:
            return event
        return {"type": event["type"], "object": self._shaped(event["object"])}

    def job(self, name: str) -> Json:
        with self._explaining(name):
            return _typed(self.api.request("GET", self.path(PLURAL, name)))

    @contextmanager
    def _explaining(self, name: str | None = None) -> Iterator[None]:
        """Replace an ApiRefusal from the enclosed code with a Mistake that gives the actual reason.

        For example, a 404 means either that the job does not exist, or that the cluster lacks the
        CRD.
        """
        try:
            yield
        except ApiRefusal as refusal:
            raise self._find_reason(name, refusal) from refusal

    def _find_reason(self, name: str | None, refusal: ApiRefusal) -> Mistake:
        if refusal.status != 404:
            return refusal
        if not _names_object(refusal):
            return Mistake(NO_CRD)
        if name is None:
            return refusal
        try:
            known = [job["metadata"]["name"] for job in self.jobs()]
        except Mistake as mistake:
            if mistake.denied:
                return NoSuchJob(f"no job {name} in {self.where}")
            raise
        shown = ", ".join(known[:10]) + (f" and {len(known) - 10} more" if len(known) > 10 else "")
        return NoSuchJob(f"no job {name} in {self.where}; jobs there: {shown or 'none'}")

    def changes(
        self, name: str | None, seconds: float | None = None, known: Iterable[Json] | None = None
    ) -> Iterator[tuple[Json, bool]]:
        end = None if seconds is None else time.monotonic() + seconds
        query = {"fieldSelector": f"metadata.name={name}"} if name is not None else {}
        path = self.path(PLURAL, everywhere=self.everywhere)
        seen = {_key(job): job for job in known or ()}
        kept = _versioned if known is not None else _typed
        answered = False
        patience = OutagePatience()
        while True:
            try:
                with self._explaining():
                    items, version = self.api.listing(path, query, shape=self._shaped)
            except Mistake as mistake:
                if not answered:
                    raise
                patience.tolerate(mistake)
                self.notes = [str(mistake)]
                if end is not None and time.monotonic() >= end:
                    return
                time.sleep(_RETRY_SECONDS)
                continue
            answered = True
            patience.answered()
            self.notes = []
            if name is not None and not items and not seen:
                raise NoSuchJob(f"no job {name} in {self.where}")
            there = {_key(job) for job in items}
            for key in [key for key in seen if key not in there]:
                yield seen.pop(key), True
            items.reverse()
            # Remove each job from the list, so that the list does not keep it in memory during the
            # watch.
            while items:
                job = items.pop()
                before = seen.get(_key(job), {}).get("metadata", {}).get("resourceVersion")
                if before != job["metadata"]["resourceVersion"]:
                    seen[_key(job)] = kept(job)
                    yield job, False
                del job
            for job, gone in self._watched(path, query, version, end):
                if gone:
                    seen.pop(_key(job), None)
                else:
                    seen[_key(job)] = kept(job)
                yield job, gone
            if end is not None and time.monotonic() >= end:
                return
            time.sleep(0.2)

    def _watched(
        self, path: str, query: Mapping[str, str], version: str, end: float | None
    ) -> Iterator[tuple[Json, bool]]:
        """Yield (object, deleted) for each change, until the watch ends or the connection breaks.

        The API server ends every watch after a while.
        """
        left = _WATCH_SECONDS if end is None else max(1, min(_WATCH_SECONDS, round(end - time.monotonic())))
        watch = {**query, "watch": "1", "resourceVersion": version, "timeoutSeconds": str(left)}
        try:
            for event in self.api.lines(path, watch, silence=left + 10.0, shape=self._shaped_event):
                if event.get("type") not in _CHANGES:
                    return
                yield event["object"], event["type"] == "DELETED"
        except Mistake as mistake:
            if not mistake.passing:
                raise
            time.sleep(_RETRY_SECONDS)

    def pods(self, name: str) -> list[PodLine]:
        selector = f"{LABEL_MANAGED}={MANAGED_BY},{LABEL_JOB}={name}"
        bodies = self._without_deleted_job(
            name, self.api.items(self.path("pods"), {"labelSelector": selector}, of_a_job=True)
        )
        lines = []
        for body in bodies:
            try:
                view = read_pod(body)
            except (KeyError, ValueError):
                continue  # An unrelated pod can have the job's label.
            lines.append(_pod_line(view, [c["name"] for c in body["spec"]["containers"]]))
        lines.sort(key=lambda pod: (-1 if pod.index is None else pod.index, str(pod.created), pod.name))
        prepared = [at for at, line in enumerate(lines) if line.state in _PREPARED and not line.message]
        for at in prepared[:_WARNED_PODS]:
            lines[at] = replace(lines[at], message=self._last_warning(lines[at].name))
        return lines

    def _without_deleted_job(self, name: str, pods: list[Json]) -> list[Json]:
        """Return `pods` without the pods of a deleted job that had the same name.

        The pods of a deleted job exist until they have terminated, so they can coexist with those
        of a new job. If the current job does not exist, or the user is not permitted to read it,
        all pods are returned.
        """
        uids = {pod["metadata"]["labels"].get(LABEL_UID) for pod in pods}
        if len(uids) < 2 and not any("deletionTimestamp" in pod["metadata"] for pod in pods):
            return pods
        job = self.api.optional(self.path(PLURAL, name))
        uid = job["metadata"]["uid"] if job is not None else None
        return [pod for pod in pods if uid in (None, pod["metadata"]["labels"].get(LABEL_UID))]

    def _last_warning(self, pod: str) -> str:
        """Return a pod's last warning event as text.

        Volume and network faults appear only in events. The text is empty if the pod has no
        warnings, if the user is not permitted to read events, or if the events are too large.
        """
        try:
            found = self._events(f"involvedObject.kind=Pod,involvedObject.name={pod},type=Warning")
        except (ApiRefusal, AnswerTooLarge):
            return ""
        return f"{found[-1].reason}: {found[-1].message}" if found else ""

    def events(self, name: str) -> list[Happened]:
        # Select by UID as well, because a cluster also keeps events of earlier jobs with this name.
        uid = self.job(name)["metadata"]["uid"]
        return self._events(f"involvedObject.kind={KIND},involvedObject.name={name},involvedObject.uid={uid}")

    def _events(self, chosen: str) -> list[Happened]:
        """Return the events that match the field selector `chosen`, oldest first."""
        found = [
            Happened(
                parse_time(
                    event.get("lastTimestamp") or event.get("eventTime") or event["metadata"]["creationTimestamp"]
                ),
                event.get("type") == "Warning",
                str(event.get("reason") or ""),
                str(event.get("message") or ""),
                int((event.get("series") or {}).get("count") or event.get("count") or 1),
            )
            for event in self.api.items(self.path("events"), {"fieldSelector": chosen}, of_a_job=True)
        ]
        return sorted(found, key=lambda event: str(event.time))

    def log(self, pod: PodLine, options: LogOptions) -> Iterator[bytes]:
        # Choose the container by its name. The pod's first container can be a sidecar that an
        # admission webhook has inserted.
        own = (name for name in (TRAINER_CONTAINER, COORDINATOR_CONTAINER) if name in pod.containers)
        container = next(own, next(iter(pod.containers), ""))
        query = {"container": container} if container else {}
        query |= {"follow": "true"} if options.follow else {}
        query |= {"previous": "true"} if options.previous else {}
        query |= {"tailLines": str(options.tail)} if options.tail is not None else {}
        query |= {"sinceSeconds": str(options.since)} if options.since is not None else {}
        path = f"{self.path('pods', pod.name)}/log"
        silence = SILENCE_SECONDS if options.follow and options.stop is not None else None
        read, patience = _ReadPosition(), OutagePatience()
        ended = pod.ended or not options.follow
        while True:
            try:
                for line in _lines(self.api.stream(path, {**query, "timestamps": "true"}, silence)):
                    if options.stopped:
                        return
                    if not line.endswith(b"\n") and not ended:
                        # The connection broke in the middle of a line, so the whole line is read
                        # again.
                        break
                    stamp, _, text = line.partition(b" ")
                    if read.is_new(stamp):
                        yield text
                if ended:
                    return
                patience.answered()
            except ApiRefusal as refusal:
                if options.follow and refusal.status == 404:
                    return  # The pod is gone.
                if ended and not (options.follow and refusal.passing):
                    raise
                if refusal.status != _WAITING_TO_START:
                    patience.tolerate(refusal)
            except NoAnswer as failure:
                if not options.follow:
                    raise
                if options.stop is None:
                    # Give up if the failures last too long. A caller that passes `options.stop`
                    # decides for itself when to give up. Such a caller's requests time out after a
                    # short silence, so a failure may only mean that the pod has written nothing.
                    patience.tolerate(failure)
            if options.stopped:
                return
            # The connection ended before the pod ended, or before all of the pod's last lines were
            # read. Continue after the last line that was read.
            time.sleep(_RETRY_SECONDS / 2)
            ended = self._has_ended(pod.name)
            if read.stamp:
                query.pop("tailLines", None)
                query.pop("sinceSeconds", None)
                query["sinceTime"] = read.stamp.decode(errors="replace")
            read.again()

    def kept_logs(self, name: str) -> KeptLogs:
        """Return the logs kept in the job's bucket, or on the volume that its running pods mount.

        All pods usually mount the same volume, so the logs from the first readable pod are enough.
        With a hostPath that is not shared, a pod sees only the logs on its own Kubernetes node. In
        this case, the logs from the first few pods are combined.
        """
        body = self.job(name)
        uid, spec = body["metadata"]["uid"], body["spec"]
        checkpoints = (spec.get("storage") or {}).get("checkpoints") or {}
        found = KeptLogs(name, uid, {}, lambda file: b"")
        if not checkpoints or checkpoints.get("readOnly") or spec.get("command"):
            # A job with `command`, or without a writable checkpoint folder, keeps no logs.
            return found
        if checkpoints.get("url"):
            return in_bucket(checkpoints, f"{self.namespace}/{name}", name, uid)
        fault = _unreadable(name, checkpoints) if (spec.get("runPolicy") or {}).get("logsKept") else None
        one_folder = not checkpoints.get("hostPath") or checkpoints.get("shared")
        end = time.monotonic() + _METRICS_SECONDS
        for pod in self._running_pods(name)[:_METRICS_PODS]:
            if time.monotonic() > end:
                break
            try:
                found, fault = found.joined(in_pod(partial(self.run_in, pod), name, uid)), None
            except Mistake as mistake:
                fault = fault and mistake
                continue
            if one_folder:
                break
        if fault is not None:
            raise fault
        return found

    def _running_pods(self, name: str) -> list[PodLine]:
        """Return the pods that can run commands, nodes before spares."""
        running = [pod for pod in self.pods(name) if pod.index is not None and pod.state == "Running"]
        return sorted(running, key=lambda pod: pod.role != "node")

    def metrics(self, name: str) -> str:
        """Return the end of metrics.jsonl from one of the first few running pods.

        If the pods do not share a checkpoint folder, only rank 0's pod has the file. Several pods
        are therefore tried.
        """
        running = self._running_pods(name)  # Nodes come first, because spares have not trained.
        pods = running[:_METRICS_PODS]
        end = time.monotonic() + _METRICS_SECONDS
        for asked, pod in enumerate(pods):
            if time.monotonic() > end:
                raise Mistake(
                    f"{name}: {METRICS} was not found within {_METRICS_SECONDS:.0f} s (pods searched: {asked}); try "
                    "again"
                )
            if found := self.run_in(pod, _METRICS_PROBE).partition(_METRICS_MARK)[2]:
                return found
        if pods:
            which = "no pod has" if len(pods) == len(running) else f"none of its first {len(pods)} pods has"
            raise Mistake(f"{name}: {which} {METRICS} in its checkpoint folder; {METRICS_WRITERS}")
        raise Mistake(
            f"{name}: no pod is running; to plot the metrics, run `python -m ddpjob_trainer plot` on {METRICS} in the "
            "job's checkpoint folder"
        )

    def _has_ended(self, pod: str) -> bool:
        try:
            body = self.api.optional(self.path("pods", pod))
            return body is None or read_pod(body).ended
        except (KeyError, ValueError):
            return True
        except Mistake:
            return False  # The next request for the log reports any problem.

    # --- acting, as the user

    def patch(self, name: str, spec: Json) -> None:
        with self._explaining(name):
            self.api.request("PATCH", self.path(PLURAL, name), body={"spec": spec}, content_type=MERGE_PATCH)

    def create(self, manifests: list[Json]) -> str:
        """Create a job and its ConfigMaps, and return the job's name.

        The last manifest is the job. The job is created first, so that the ConfigMaps can name it
        as their owner.
        """
        *needed, job = manifests
        with self._explaining():
            created = self.api.request("POST", self.path(PLURAL), body=with_commit(job))
        name = str(created["metadata"]["name"])
        owner = {"apiVersion": API_VERSION, "kind": KIND, "name": name, "uid": created["metadata"]["uid"]}
        try:
            for body in needed:
                self._create_map({**body, "metadata": {**body["metadata"], "ownerReferences": [owner]}})
        except (Mistake, KeyboardInterrupt) as mistake:
            try:
                self.delete(name)
            except Mistake as other:
                left = f"{str(mistake) or 'Ctrl-C'}; job {name} was created, but could not be deleted: {other}"
                raise Mistake(f"{left}; run `ddpjob delete {name}` to delete it") from mistake
            raise
        return name

    def code_of(self, body: Json) -> list[Json]:
        """Return the ConfigMaps that the job owns and its pods mount.

        Raises ApiRefusal if the user is not permitted to read them.
        """
        pod = ((body["spec"].get("podTemplate") or {}).get("spec")) or {}
        names = [volume["configMap"].get("name") for volume in pod.get("volumes") or () if volume.get("configMap")]
        found = [self.api.existing(self.path("configmaps", str(name))) for name in names]
        owned = [m for m in found if m and body["metadata"]["uid"] in _owners(m)]
        return [{"apiVersion": "v1", "kind": "ConfigMap", **m} for m in owned]

    def _create_map(self, body: Json) -> None:
        """Create a ConfigMap whose name contains a digest of its content.

        If a deleted job's ConfigMap with the same name and content still exists, wait until that
        ConfigMap is gone.
        """
        end = time.monotonic() + _LEAVING_SECONDS
        while True:
            try:
                self.api.request("POST", self.path("configmaps"), body=body)
                return
            except ApiRefusal as refusal:
                if refusal.status != 409:
                    raise
                there = self.api.optional(self.path("configmaps", body["metadata"]["name"])) or body
                if any(there.get(part) != body.get(part) for part in ("data", "binaryData")) or time.monotonic() > end:
                    raise
                if not there["metadata"].get("ownerReferences"):
                    # A ConfigMap without an owner will not be deleted, so the job can use it.
                    return
            time.sleep(_RETRY_SECONDS / 2)

    def dry_run(self, plural: str, body: Json) -> Json:
        """Return the object as the API server would store it after admission. Raises ApiRefusal."""
        query = {"dryRun": "All", "fieldValidation": "Strict"}
        return self.api.request("POST", self.path(plural), query=query, body=body)

    def delete(self, name: str) -> None:
        with self._explaining(name):
            self.api.request("DELETE", self.path(PLURAL, name), query={"propagationPolicy": "Background"})

    def kill(self, pod: str) -> None:
        body = self.api.existing(self.path("pods", pod))
        if body is None or LABEL_JOB not in body["metadata"].get("labels", {}):
            raise Mistake(
                f"no job has a pod {pod} in {self.where}; run `ddpjob describe JOB` to list the pods of a job"
            )
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0,
                   "preconditions": {"uid": body["metadata"]["uid"]}}  # fmt: skip
        self.api.request("DELETE", self.path("pods", pod), body=options)

    def run_in(self, pod: PodLine, code: str) -> str:
        from kubernetes.client import CoreV1Api
        from kubernetes.stream import stream

        # `stream` changes the client so that it sends its requests over WebSockets. Pass a copy, so
        # that other requests with this client are not affected.
        client = copy(self.api.client)
        try:
            answer = stream(
                CoreV1Api(client).connect_get_namespaced_pod_exec, pod.name, self.namespace,
                command=["python3", "-c", code], container="trainer", stdout=True, stderr=True,
                _request_timeout=_EXEC_SECONDS, _preload_content=False,
            )  # fmt: skip
            return _output(answer.sock, pod.name)
        except Mistake:
            raise
        except Exception as error:  # ApiException, or an exception of websocket-client
            raise Mistake(f"pod {pod.name}: {_refusal(str(getattr(error, 'reason', None) or error))}") from error


NO_CRD = (
    "this cluster has no DDPJobs, because their definition (CRD) is not installed; install the operator with "
    "`helm install ddpjob charts/ddpjob-operator -n ddpjob --create-namespace`, and check it with `ddpjob doctor`"
)


def _unreadable(name: str, checkpoints: Json) -> Mistake:
    """Return the error for a job whose kept logs are on a volume that no running pod can read."""
    where = f"{checkpoints.get('mountPath') or '/checkpoints'}/{LOGS_FOLDER}"
    return Mistake(
        f"{name}: no running pod can read {where}, which contains the logs of deleted pods. Start a pod that mounts "
        f"this volume, and run `cat {where}/POD.*` in it"
    )


def _output(sock: Any, pod: str) -> str:
    """Return the output of a command in a pod.

    Read until the command exits, for at most _EXEC_SECONDS. Raises Mistake if the output is too
    large. The python3 in a job's image can be any program and may never stop printing, so each
    frame is counted as it arrives. WSClient.update is not used, because it would store everything
    that the pod sends.
    """
    from websocket import ABNF, WebSocketConnectionClosedException, WebSocketTimeoutException

    end, size, parts = time.monotonic() + _EXEC_SECONDS, 0, list[bytes]()
    try:
        while (left := end - time.monotonic()) > 0:
            sock.settimeout(left)
            opcode, frame = sock.recv_data_frame(True)
            if opcode == ABNF.OPCODE_CLOSE:
                break
            if opcode in (ABNF.OPCODE_BINARY, ABNF.OPCODE_TEXT) and frame.data[:1] in _PRINTED:
                parts.append(frame.data[1:])
                size += len(frame.data)
            if size > MOST_OUTPUT:
                raise Mistake(
                    f"pod {pod}: python3 printed more than {MOST_OUTPUT >> 20} MiB; check that `python3` starts Python "
                    "in the job's image"
                )
    except (WebSocketConnectionClosedException, WebSocketTimeoutException):
        pass  # Return the output that has arrived.
    finally:
        sock.shutdown()
    return b"".join(parts).decode(errors="replace")


def _refusal(said: str) -> str:
    """Return the API server's message from an error of websocket-client.

    websocket-client puts its own message about the failed handshake first. If no message from the
    API server follows, the message about the handshake is returned.
    """
    between = " -+-+- "
    handshake, _, rest = said.partition(between)
    try:
        return str(json.loads(rest.rpartition(between)[2])["message"])
    except (ValueError, KeyError, TypeError):
        return handshake


def _lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the lines of a stream with their line ends, including an incomplete last line."""
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from (line + b"\n" for line in whole)
        # Limit the memory for a very long line, but keep enough to show that it exceeds LINE_BYTES.
        rest = rest[: LINE_BYTES + 64]
    if rest:
        yield rest


class _ReadPosition:
    """The position up to which a log has been read.

    A timestamp alone does not identify a line, because several lines can have the same timestamp.
    In addition, later lines have earlier timestamps if the host's clock was set back.
    """

    def __init__(self) -> None:
        self.stamp, self._lines, self._skip = b"", 0, 0
        """The timestamp of the last line, the number of lines read with this timestamp, and how
        many of these lines must still be skipped after a reconnection."""
        self._skipping = False

    def again(self) -> None:
        """Prepare for a new connection, which first repeats earlier lines.

        The repetition begins at the time `stamp` or earlier. `is_new` returns False for each
        repeated line that has already been read.
        """
        self._skipping, self._skip = bool(self.stamp), self._lines

    def is_new(self, stamp: bytes) -> bool:
        """Return whether the next line of the log is new. `stamp` is the timestamp of this line."""
        if self._skipping:
            if _order(stamp) < _order(self.stamp):
                return False
            if stamp == self.stamp and self._skip:
                self._skip -= 1
                return False
            self._skipping = False
        self._lines = self._lines + 1 if stamp == self.stamp else 1
        self.stamp = stamp
        return True


def _order(stamp: bytes) -> tuple[bytes, bytes]:
    """Return a sort key for the timestamp of a log line.

    The timestamps themselves would sort wrongly as strings, because their fractions of a second
    have no trailing zeros.
    """
    whole, _, fraction = stamp.removesuffix(b"Z").partition(b".")
    return whole, fraction.ljust(9, b"0")


def _names_object(refusal: ApiRefusal) -> bool:
    """Whether a 404 means that an object does not exist, and not that its kind is unknown."""
    return re.search(r'"[^"]+" not found', str(refusal)) is not None


def _typed(job: Json) -> Json:
    """Return a job with apiVersion and kind, which the API server leaves out in lists."""
    return {"apiVersion": API_VERSION, "kind": KIND, **job}


def _versioned(job: Json) -> Json:
    """Reduce a job to the metadata that identifies it and shows whether it has changed."""
    return {"metadata": {part: job["metadata"].get(part, "") for part in ("namespace", "name", "resourceVersion")}}


def _key(job: Json) -> tuple[str, str]:
    return job["metadata"].get("namespace", ""), job["metadata"]["name"]


def _pod_line(view: PodView, containers: list[str]) -> PodLine:
    waits = find_stuck(view, has_run=True)
    message = waits.message if waits else view.unschedulable or view.gated or view.status_message
    state = view.phase
    if view.main.ended:
        state = "Completed" if view.main.exit_code == 0 else f"Error ({view.main.exit_code})"
        message = message or read_termination_message(view.main).message
    elif view.deleted_at is not None:
        state = "Terminating"
    elif waits:
        state = waits.reason
    elif view.unschedulable:
        state = "Unschedulable"
    elif view.gated:
        state = SCHEDULING_GATED
    elif view.phase == "Pending" and view.host:
        state = view.main.waiting_reason or "ContainerCreating"
    elif failed := {name: c.exit_code for name, c in view.containers.items() if c.exit_code}:
        # A container other than the main container has failed. kubectl shows such a pod as 1/2 and
        # Error, although the pod's main program is still running.
        message = message or ", ".join(f"container {name} ended with exit code {code}" for name, code in failed.items())
    index = None if view.role is Role.COORDINATOR else view.index
    return PodLine(
        view.name, str(view.role), index, state, view.host, message, view.created, tuple(containers), view.ended
    )


def _owners(body: Json) -> list[str]:
    return [str(owner.get("uid")) for owner in body["metadata"].get("ownerReferences") or ()]

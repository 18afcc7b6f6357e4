"""The objects of an API server: versions, preconditions, graceful deletion, and garbage collection.

The in-memory cluster uses it directly, and the fake API server of tests/controller over HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from .clock import Clock, stamp

Json = dict[str, Any]
NAMESPACE = "space"
Backup = tuple[int, dict[str, dict[tuple[str, str], Json]]]
"""A version, and the objects by kind, namespace and name."""
Watcher = Callable[[str, str, Json], None]
"""(kind, ADDED | MODIFIED | DELETED, object)"""


class Refusal(Exception):
    """A response with status 4xx."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status, self.reason, self.message = status, reason, message


class Store:
    """Objects by kind, namespace and name. Watchers are called after every change, in the order
    of the versions.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.version = 100
        self.watchers: list[Watcher] = []
        self._objects: dict[str, dict[tuple[str, str], Json]] = {}
        self._uids = 0

    def backup(self) -> Backup:
        """Return the current objects and their version."""
        return self.version, deepcopy(self._objects)

    def restore(self, backup: Backup) -> None:
        """Restore the objects and versions of a backup."""
        self.version, self._objects = backup[0], deepcopy(backup[1])

    def all(self, kind: str) -> Iterator[Json]:
        """Return the objects of a kind, in creation order."""
        return iter(list(self._objects.get(kind, {}).values()))

    def find(self, kind: str, name: str, namespace: str = NAMESPACE) -> Json | None:
        """Return an object or None."""
        return self._objects.get(kind, {}).get((namespace, name))

    def get(self, kind: str, name: str, namespace: str = NAMESPACE) -> Json:
        """Return an object. Raises Refusal 404."""
        body = self.find(kind, name, namespace)
        if body is None:
            raise Refusal(404, "NotFound", f'{kind} "{name}" not found')
        return body

    def create(self, kind: str, body: Json, namespace: str = NAMESPACE) -> Json:
        """Add an object, with the fields that the server itself writes. Raises Refusal 409."""
        name = body["metadata"]["name"]
        if self.find(kind, name, namespace) is not None:
            raise Refusal(409, "AlreadyExists", f'{kind} "{name}" already exists')
        self._uids += 1
        meta = {
            **body["metadata"],
            "namespace": namespace,
            "uid": body["metadata"].get("uid", f"uid-{self._uids}"),
            "creationTimestamp": self.clock.stamp(),
            "generation": 1,
        }
        body = {**body, "metadata": meta}
        self._objects.setdefault(kind, {})[namespace, name] = body
        self.changed(kind, body, "ADDED")
        return body

    def changed(self, kind: str, body: Json, what: str = "MODIFIED") -> None:
        """Note that the object was changed in place: set its version and call the watchers."""
        self.version += 1
        body["metadata"]["resourceVersion"] = str(self.version)
        for watcher in self.watchers:
            watcher(kind, what, body)

    def replace_status(self, kind: str, name: str, body: Json, namespace: str = NAMESPACE) -> Json:
        """Write the status, if the version in the metadata is current. Raises Refusal 404 and
        409.
        """
        known = self.get(kind, name, namespace)
        self._check_version(known, body)
        known["status"] = body["status"]
        self.changed(kind, known)
        return known

    def replace(self, kind: str, name: str, body: Json, namespace: str = NAMESPACE) -> Json:
        """Write everything except metadata other than annotations, if the version in the metadata
        is current.

        Raises Refusal 404 and 409.
        """
        known = self.get(kind, name, namespace)
        self._check_version(known, body)
        known["metadata"]["annotations"] = body["metadata"].get("annotations", {})
        known.update({key: value for key, value in body.items() if key != "metadata"})
        self.changed(kind, known)
        return known

    def _check_version(self, known: Json, body: Json) -> None:
        wanted = body["metadata"].get("resourceVersion")
        if wanted is not None and wanted != known["metadata"]["resourceVersion"]:
            raise Refusal(
                409, "Conflict", "the object has been modified; please apply your changes to the latest version"
            )

    def label(self, kind: str, name: str, uid: str | None, labels: Json, namespace: str = NAMESPACE) -> Json:
        """Merge labels. Raises Refusal 404, and 409 if the uid differs."""
        known = self._same(kind, name, uid, namespace)
        known["metadata"]["labels"] = {**known["metadata"].get("labels", {}), **labels}
        self.changed(kind, known)
        return known

    def own(self, kind: str, name: str, uid: str | None, owners: list[Json], namespace: str = NAMESPACE) -> Json:
        """Merge owners, by their uids. Raises as `label` does."""
        known = self._same(kind, name, uid, namespace)
        meta = known["metadata"]
        merged = {owner["uid"]: owner for owner in [*meta.get("ownerReferences", []), *owners]}
        meta["ownerReferences"] = list(merged.values())
        self.changed(kind, known)
        return known

    def _same(self, kind: str, name: str, uid: str | None, namespace: str) -> Json:
        known = self.get(kind, name, namespace)
        if uid is not None and uid != known["metadata"]["uid"]:
            raise Refusal(409, "Conflict", "the UID in the patch does not match")
        return known

    def delete(
        self, kind: str, name: str, uid: str | None = None, grace: int | None = None, namespace: str = NAMESPACE
    ) -> Json:
        """Request an object's deletion. A pod that a kubelet may run gets its grace period; other
        objects go immediately.

        Raises Refusal 404, and 409 if the precondition on the uid fails.
        """
        body = self.get(kind, name, namespace)
        meta = body["metadata"]
        if uid is not None and uid != meta["uid"]:
            raise Refusal(409, "Conflict", "the UID in the precondition does not match")
        if kind == "Pod" and grace != 0 and _has_kubelet(body):
            seconds = body["spec"].get("terminationGracePeriodSeconds", 30) if grace is None else grace
            if "deletionTimestamp" not in meta or seconds < meta["deletionGracePeriodSeconds"]:
                meta["deletionTimestamp"] = stamp(self.clock.now + seconds)
                meta["deletionGracePeriodSeconds"] = seconds
                self.changed(kind, body)
            return body
        self.remove(kind, body)
        return body

    def remove(self, kind: str, body: Json) -> None:
        """Remove the object and everything that it owned."""
        meta = body["metadata"]
        del self._objects[kind][meta["namespace"], meta["name"]]
        self.changed(kind, body, "DELETED")
        for other_kind in list(self._objects):
            for other in list(self._objects[other_kind].values()):
                owners = other["metadata"].get("ownerReferences", [])
                left = [owner for owner in owners if owner.get("uid") != meta["uid"]]
                if left and left != owners:
                    other["metadata"]["ownerReferences"] = left
                    self.changed(other_kind, other)
                elif left != owners:
                    self.delete(other_kind, other["metadata"]["name"], namespace=other["metadata"]["namespace"])


def _has_kubelet(pod: Json) -> bool:
    return bool(pod["spec"].get("nodeName")) and pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")

"""The `ddpjob doctor` command, which checks the versions of the client, the CRD and the operator,
and the user's permissions.

It suggests a remedy for each failure.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ddpjob.api.job import GROUP, PLURAL, VERSION
from ddpjob.api.job_spec import Json
from ddpjob.api.schema import load_crd
from ddpjob.client.backends.api_server import ApiRefusal, ApiServer
from ddpjob.client.manifests.explain_fields import paths
from ddpjob.missing_package import INSTALL, installed_version

SUPPORTED_MINOR = 29
"""The chart accepts this minor version of Kubernetes 1, and later ones."""
RIGHTS = (
    (GROUP, PLURAL, "", ("get", "list", "watch", "create", "patch", "delete")),
    ("", "pods", "", ("get", "list", "create", "delete")),
    ("", "pods", "log", ("get",)),
    # Commands run in pods through a WebSocket, which is opened with an HTTP GET. This needs the
    # right `get`. Since version 1.35, Kubernetes also requires the right `create`.
    ("", "pods", "exec", ("get", "create")),
    ("", "events", "", ("list",)),
    ("", "configmaps", "", ("get", "create")),
)
"""The rights that users of the commands need, as tuples (group, resource, subresource, verbs)."""
_CREATED = ("get", "list", "watch", "create")
OPERATOR_RIGHTS = (
    (GROUP, PLURAL, "", ("get", "list", "watch", "delete")),
    (GROUP, PLURAL, "status", ("update",)),
    ("", "pods", "", (*_CREATED, "delete", "patch")),
    ("", "services", "", _CREATED),
    ("", "configmaps", "", (*_CREATED, "patch")),
    ("", "secrets", "", ("create",)),
    ("networking.k8s.io", "networkpolicies", "", _CREATED),
    ("policy", "poddisruptionbudgets", "", _CREATED),
    ("", "persistentvolumeclaims", "", ("get", "create")),
    ("coordination.k8s.io", "leases", "", ("create",)),
    ("events.k8s.io", "events", "", ("create",)),
)
"""The rights that the chart gives the operator in each namespace that the operator watches."""
_NEEDED_BY = {
    "pods/exec": "stacks",
    "configmaps create": "submit with code",
    "configmaps get": "rerun with code",
    "pods create": "validate --server",
}


@dataclass(frozen=True)
class Diagnosis:
    """One line of the report. If `ok` is None, the result is unknown."""

    ok: bool | None
    what: str
    remedy: str = ""


def checks(api: ApiServer, namespace: str) -> Iterator[Diagnosis]:
    """Check a cluster and yield the result of each check. Raises Unreachable.

    The checks are ordered so that the first failure explains later failures.
    """
    yield Diagnosis(True, f"client {installed_version()}, Python {platform.python_version()}")
    try:
        version = api.request("GET", "/version")
    except ApiRefusal as error:
        yield Diagnosis(False, f"the API server: {error}")
        return
    minor = "".join(c for c in str(version.get("minor", "")) if c.isdigit())
    old = bool(minor) and int(minor) < SUPPORTED_MINOR
    where = f"{api.client.configuration.host}, context {api.context}"
    found = f"Kubernetes {version.get('gitVersion', '?')} at {where}"
    yield Diagnosis(not old, found, f"the operator needs Kubernetes 1.{SUPPORTED_MINOR} or later")
    yield from _definition(api)
    yield from _operators(api, namespace)
    yield from _rights(api, namespace)


def _definition(api: ApiServer) -> Iterator[Diagnosis]:
    name = f"{PLURAL}.{GROUP}"
    upgrade = (
        "kubectl apply --server-side --force-conflicts -f charts/ddpjob-operator/crds, from the operator's release"
    )
    try:
        crd = api.request("GET", f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}")
    except ApiRefusal as refusal:
        if refusal.status == 403:
            served = api.optional(f"/apis/{GROUP}/{VERSION}")
            yield Diagnosis(
                served is not None, f"definition {name}: " + ("served" if served else "not served"), upgrade
            )
        else:
            yield Diagnosis(False, f"definition {name}: not installed", upgrade)
        return
    missing, extra = _differences(crd)
    if missing:
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        yield Diagnosis(False, f"definition {name} is older than this client: it lacks {shown}", upgrade)
    elif extra:
        shown = ", ".join(extra[:5]) + (", ..." if len(extra) > 5 else "")
        yield Diagnosis(
            False,
            f"definition {name} is newer than this client, which lacks {shown}",
            f"upgrade the client: {INSTALL.format(extra='cli')}",
        )
    else:
        yield Diagnosis(True, f"definition {name} is the same as this client's")


def _differences(crd: Json) -> tuple[list[str], list[str]]:
    """Return the fields that only the client's CRD has, and those that only the cluster's has."""
    here, there = ({*paths(_schema(c))} for c in (load_crd(), crd))
    return sorted(here - there), sorted(there - here)


def _schema(crd: Json) -> Json:
    versions = crd.get("spec", {}).get("versions", [])
    version: Json = next((v for v in versions if v.get("name") == VERSION), {})
    schema: Json = version.get("schema", {}).get("openAPIV3Schema", {})
    return schema


def _operators(api: ApiServer, namespace: str) -> Iterator[Diagnosis]:
    selector = {"labelSelector": "app.kubernetes.io/name=ddpjob-operator"}
    try:
        found = api.items("/apis/apps/v1/deployments", selector)
    except ApiRefusal as refusal:
        yield Diagnosis(
            None, f"the operator: you are not permitted to list deployments in all namespaces ({refusal.reason})"
        )
        return
    if not found:
        yield Diagnosis(False, "the operator: no deployment has the label app.kubernetes.io/name=ddpjob-operator",
                    "helm install ddpjob charts/ddpjob-operator -n ddpjob --create-namespace")  # fmt: skip
    for deployment in found:
        meta = deployment["metadata"]
        where = f"{meta['namespace']}/{meta['name']}"
        yield _rollout(deployment, where)
        image = deployment["spec"]["template"]["spec"]["containers"][0]["image"]
        tag = re.search("/[^/]*:v?([0-9]+[.][0-9]+[.][^:@/]+)(@|$)", f"/{image}")
        version = tag[1] if tag else (meta.get("labels") or {}).get("app.kubernetes.io/version") or f"of image {image}"
        same = version == installed_version()
        yield Diagnosis(
            same,
            f"operator {where}: version {version}",
            f"use the same release for the operator and the client (this client: {installed_version()})",
        )
    watched = [_watched(deployment) for deployment in found]
    for deployment, names in zip(found, watched, strict=True):
        if not names or namespace in names:
            yield from _rights_of_operator(api, deployment, namespace)
    if found and all(names and namespace not in names for names in watched):
        listed = ", ".join(sorted({name for names in watched for name in names}))
        yield Diagnosis(
            False,
            f"no operator acts on the jobs in namespace {namespace}; the operators watch only {listed}",
            f"add {namespace} to the chart's value watchNamespaces",
        )


_WRONG = {("Progressing", "False"), ("ReplicaFailure", "True")}
"""Deployment conditions that report a fault, as pairs (type, status). ReplicaFailure means that the
API server refuses to create pods."""


def _rollout(deployment: Json, where: str) -> Diagnosis:
    """Check whether all replicas are ready and have the latest revision.

    The number of ready replicas does not show their revision. After a faulty change, replicas of
    the earlier revision keep running and stay ready, while replicas of the latest revision never
    become ready.
    """
    meta, wanted, status = deployment["metadata"], deployment["spec"].get("replicas", 1), deployment.get("status", {})
    ready, updated = status.get("readyReplicas", 0), status.get("updatedReplicas", 0)
    behind = status.get("observedGeneration", 0) < meta.get("generation", 0) or updated < wanted
    extra = status.get("unavailableReplicas", 0)
    text = f"operator {where}: {ready} of {wanted} replicas are ready"
    if behind or extra:
        text += f", {updated} of {wanted} have the newest revision, {extra} unavailable"
    wrong = [c for c in status.get("conditions", ()) if (c.get("type"), c.get("status")) in _WRONG]
    if wrong:
        said = (f"{condition.get('reason')}: {condition.get('message')}" for condition in wrong)
        text += f" ({'; '.join(said)})"
    whole = ready >= wanted > 0 and not behind and not extra and not wrong
    pods = f"-n {meta['namespace']} -l app.kubernetes.io/name=ddpjob-operator"
    if not wanted:
        remedy = "set the chart's value replicas to at least 1"
    elif any(condition["type"] == "ReplicaFailure" for condition in wrong):
        remedy = "the API server refuses the operator's new pods; correct the error that it reports"
    else:
        remedy = (
            f"run `kubectl describe pods {pods}` to see why pods do not start, and `kubectl logs --prefix --tail=20 "
            f"{pods}` to read their logs; if a rollout is in progress, check again in a minute"
        )
    return Diagnosis(whole, text, remedy)


def _watched(deployment: Json) -> list[str]:
    """Return the namespaces that an operator watches. If it watches all, the result is empty."""
    containers = deployment["spec"]["template"]["spec"]["containers"]
    variables = (each for container in containers for each in container.get("env") or ())
    text = next((each.get("value") for each in variables if each.get("name") == "DDPJOB_OPERATOR_NAMESPACES"), None)
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _rights_of_operator(api: ApiServer, deployment: Json, namespace: str) -> Iterator[Diagnosis]:
    """Check the rights of an operator's service account.

    Only administrators are permitted to review the rights of other accounts, so other users get no
    result.
    """
    meta, account = deployment["metadata"], deployment["spec"]["template"]["spec"].get("serviceAccountName", "default")
    where, whole = meta["namespace"], "system:serviceaccounts"
    subject = {"user": f"system:serviceaccount:{where}:{account}", "groups": [whole, f"{whole}:{where}"]}
    nodes = () if _watched(deployment) else (("", "nodes", "", ("get", "list", "watch")),)
    try:
        lacking = _lacking(api, namespace, (*OPERATOR_RIGHTS, *nodes), subject)
    except ApiRefusal:
        return
    if lacking:
        text = f"operator {where}/{meta['name']}: its service account {account} is not permitted to"
        remedy = "restore its Role or ClusterRole ddpjob-operator with `helm upgrade`"
        yield Diagnosis(False, f"{text} {', '.join(lacking)} in namespace {namespace}", remedy)


def _lacking(
    api: ApiServer,
    namespace: str,
    rights: Iterable[tuple[str, str, str, tuple[str, ...]]],
    subject: Mapping[str, Any] | None = None,
) -> list[str]:
    """Return the rights that a subject lacks in a namespace.

    By default, the subject is the user.
    """
    lacking: list[str] = []
    kind = "SelfSubjectAccessReview" if subject is None else "SubjectAccessReview"
    for group, resource, subresource, verbs in rights:
        for verb in verbs:
            attributes = {"namespace": namespace, "group": group, "resource": resource, "verb": verb}
            attributes |= {"subresource": subresource} if subresource else {}
            review: Json = {"apiVersion": "authorization.k8s.io/v1", "kind": kind}
            review["spec"] = {"resourceAttributes": attributes, **(subject or {})}
            answer = api.request("POST", f"/apis/authorization.k8s.io/v1/{kind.lower()}s", body=review)
            if not answer.get("status", {}).get("allowed"):
                what = f"{resource}/{subresource}" if subresource else resource
                use = subject is None and (_NEEDED_BY.get(what) or _NEEDED_BY.get(f"{what} {verb}"))
                lacking.append(f"{verb} {what}" + (f" (for {use})" if use else ""))
    return lacking


def _rights(api: ApiServer, namespace: str) -> Iterator[Diagnosis]:
    lacking = _lacking(api, namespace, RIGHTS)
    if lacking:
        remedy = (
            f"ask an administrator for the ClusterRole edit in namespace {namespace}, which the chart extends to "
            "DDPJobs. If the chart's watchNamespaces is set or userRoles.create is false, ask for a Role that "
            "includes DDPJobs"
        )
        yield Diagnosis(
            False, f"your rights in namespace {namespace}: you are not permitted to {', '.join(lacking)}", remedy
        )
    else:
        yield Diagnosis(True, f"your rights in namespace {namespace}: sufficient for all commands")

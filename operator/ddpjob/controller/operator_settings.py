"""The operator's settings: environment variables that the chart sets from its values."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_network
from pathlib import Path
from typing import Any

from ddpjob.api.job_classes import JobClasses
from ddpjob.api.job_spec import Json
from ddpjob.controller.notifier import Receivers
from ddpjob.core.world import HealthSignals
from ddpjob.objects.platform import Platform
from ddpjob.objects.pod_template import problems

PREFIX = "DDPJOB_OPERATOR_"
MOST_SHARDS = 10
MOST_SIGNALS = 100


class SettingsError(ValueError):
    """An environment variable has an invalid value."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of the operator.

    Most fields are read from the variable `DDPJOB_OPERATOR_<FIELD>`. If a field is read from other
    variables, its description names them without the prefix `DDPJOB_OPERATOR_`.
    """

    key: bytes
    """A secret of at least 16 bytes that all replicas share. The operator derives the jobs' tokens
    from it."""
    namespaces: tuple[str, ...] = ()
    """Names of the namespaces to watch. If there are none, all namespaces are watched."""
    peer: Json | None = None
    """A NetworkPolicy peer, in JSON, that matches the operator's pods. Without a peer, no job gets
    a NetworkPolicy.
    """
    metrics_peers: tuple[Json, ...] = ()
    """A JSON list of NetworkPolicy peers that are allowed to connect to coordinators in order to
    read metrics."""
    workers: int = 16
    """Maximum number of jobs that are reconciled at the same time."""
    lease_namespace: str = ""
    """Namespace of the Lease for leader election. If the value is empty, there is no election, and
    only one replica is allowed to run."""
    lease_name: str = "ddpjob-operator"
    shards: int = 1
    """Number of shards into which the namespaces are divided. Each shard has a Lease, so at most
    this number of replicas acts at the same time."""
    identity: str = "ddpjob-operator"
    address: str = "0.0.0.0"
    """The IP address on which health and metrics are served. It is the IPv4 or IPv6 address of the
    operator's own pod."""
    health_port: int = 8080
    metrics_port: int = 9090
    """Port on which metrics are served. With 0, no metrics are served."""
    log_level: str = "INFO"
    receivers: Receivers = field(default_factory=Receivers)
    """Receivers of notifications, from three variables. RECEIVERS is a JSON object of the form
    {NAME: [NAMESPACE, ...]}, where "*" stands for all namespaces. RECEIVERS_FOLDER is the path of a
    folder with one file for each receiver. The file has the receiver's name and contains the
    receiver's URL. NOTIFY_LINK is the URL of a web page about a job, with the placeholders
    {namespace} and {job}."""
    node_health: HealthSignals = field(default_factory=HealthSignals)
    """Signs of an unhealthy Kubernetes node, from two variables with JSON lists. NODE_CONDITIONS
    lists conditions as TYPE=STATUS, and NODE_TAINTS lists taint keys. A final * makes a type or a
    key a prefix.
    """
    code_image: str = Platform.git_image
    """The image of the init container that runs `git` to clone the repository in spec.code.git."""
    classes: JobClasses = field(default_factory=JobClasses)
    """The job classes. The variable CLASSES is a JSON object of the form {NAME: {namespaces, spec,
    queue, fixed, limits}}."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Read the settings from environment variables.

        Raises SettingsError, whose message names the faulty variable.
        """

        def text(name: str, default: str) -> str:
            return environment.get(PREFIX + name, default)

        def number(name: str, default: int, most: int = 10**6) -> int:
            value = text(name, str(default))
            if not value.isascii() or not value.isdigit() or len(value) > 9 or int(value) > most:
                raise SettingsError(f"{PREFIX}{name}={value[:20]!r}: must be an integer from 0 to {most}")
            return int(value)

        def peers(name: str, kind: type, default: str) -> Any:
            value = text(name, "") or default
            try:
                found = json.loads(value)
            except ValueError as error:
                raise SettingsError(f"{PREFIX}{name}={value!r}: must be JSON ({error})") from error
            if not isinstance(found, kind) and (found is not None or default != "null"):
                raise SettingsError(f"{PREFIX}{name}={value!r}: must be a JSON {'list' if kind is list else 'object'}")
            return found

        def words(name: str) -> tuple[str, ...]:
            found = peers(name, list, "[]")
            if len(found) > MOST_SIGNALS or not all(isinstance(w, str) and w.strip("*") for w in found):
                raise SettingsError(f"{PREFIX}{name}={found!r}: must be a list of at most {MOST_SIGNALS} names")
            return tuple(found)

        # A Secret can contain bytes that are not text.
        key = text("KEY", "").encode(errors="surrogateescape")
        if len(key) < 16:
            raise SettingsError(
                f"{PREFIX}KEY must be a secret of at least 16 characters that is the same at every start. If it"
                " changes, running jobs restart from their checkpoints. The chart generates a secret and keeps it"
            )
        shards, lease_namespace = number("SHARDS", cls.shards), text("LEASE_NAMESPACE", "")
        if not 1 <= shards <= MOST_SHARDS:
            raise SettingsError(f"{PREFIX}SHARDS={shards}: must be from 1 to {MOST_SHARDS}")
        if shards > 1 and not lease_namespace:
            raise SettingsError(
                f"{PREFIX}SHARDS={shards}: more than one shard needs Leases; set {PREFIX}LEASE_NAMESPACE"
            )
        log_level = text("LOG_LEVEL", cls.log_level).upper()
        if log_level not in logging.getLevelNamesMapping():
            remedy = "must be DEBUG, INFO, WARNING, ERROR or CRITICAL"
            raise SettingsError(f"{PREFIX}LOG_LEVEL={log_level!r}: {remedy}")
        return cls(
            key=key,
            namespaces=tuple(n.strip() for n in text("NAMESPACES", "").split(",") if n.strip()),
            peer=peers("PEER", dict, "null"),
            metrics_peers=_metrics_peers(peers("METRICS_PEERS", list, "[]")),
            workers=number("WORKERS", cls.workers),
            lease_namespace=lease_namespace,
            lease_name=text("LEASE_NAME", cls.lease_name),
            shards=shards,
            identity=text("IDENTITY", os.uname().nodename),
            address=text("ADDRESS", cls.address) or cls.address,
            health_port=number("HEALTH_PORT", cls.health_port, 65535),
            metrics_port=number("METRICS_PORT", cls.metrics_port, 65535),
            log_level=log_level,
            receivers=_receivers(peers("RECEIVERS", dict, "{}"), text("RECEIVERS_FOLDER", ""), text("NOTIFY_LINK", "")),
            node_health=_signals(words("NODE_CONDITIONS"), words("NODE_TAINTS")),
            code_image=text("CODE_IMAGE", "") or cls.code_image,
            classes=_classes(peers("CLASSES", dict, "{}")),
        )


def _metrics_peers(found: list[Json]) -> tuple[Json, ...]:
    """Read the list of peers that are allowed to read metrics, and correct the address blocks in
    this list.

    A block such as 10.0.0.1/8 has address bits that its prefix does not cover. Recent API servers
    reject such a block, and every job would then lack its NetworkPolicy. The surplus bits are
    therefore cleared. Raises SettingsError for a block that is not a network.
    """

    def network(text: str) -> str:
        try:
            return str(ip_network(text, strict=False))
        except ValueError as error:
            raise SettingsError(f"{PREFIX}METRICS_PEERS has ipBlock {text!r}: {error}") from error

    try:
        for block in (value for peer in found for key, value in peer.items() if key == "ipBlock"):
            block["cidr"] = network(block.get("cidr", ""))
            if "except" in block:
                block["except"] = [network(text) for text in block["except"]]
    except (AttributeError, TypeError):
        text = "must be a list of NetworkPolicy peers, in which each ipBlock is an object with a cidr"
        raise SettingsError(f"{PREFIX}METRICS_PEERS={json.dumps(found)}: {text}") from None
    return tuple(found)


_NAME = re.compile("[a-z0-9]([-a-z0-9]*[a-z0-9])?")


def _receivers(namespaces: Json, folder: str, link: str) -> Receivers:
    """Read the settings for receivers of notifications.

    Raises SettingsError.
    """
    for name, allowed in namespaces.items():
        if not _NAME.fullmatch(name) or not isinstance(allowed, list) or not all(isinstance(n, str) for n in allowed):
            remedy = 'write {"NAME": ["NAMESPACE", ...]}, with NAME in lower-case letters, digits and \'-\''
            raise SettingsError(f"{PREFIX}RECEIVERS has {name!r}: {allowed!r}; {remedy}")
    if namespaces and not folder:
        raise SettingsError(
            f"{PREFIX}RECEIVERS_FOLDER is not set; set it to the folder that contains the receivers' URLs"
        )
    return Receivers({name: tuple(allowed) for name, allowed in namespaces.items()}, Path(folder), link)


def _classes(found: Json) -> JobClasses:
    """Read the job classes.

    Raises SettingsError.
    """
    try:
        read = JobClasses.read(found)
    except ValueError as error:
        raise SettingsError(f"{PREFIX}CLASSES: {error}") from error
    for name, one in read.classes.items():
        faults = problems(one.spec.get("podTemplate") or {})
        if faults:
            raise SettingsError(f"{PREFIX}CLASSES: {name}.{'; '.join(faults)}")
    return read


_STATUSES = ("True", "False", "Unknown")
_OF_A_HEALTHY_NODE = {
    "Ready": "True",
    **dict.fromkeys(("MemoryPressure", "DiskPressure", "PIDPressure", "NetworkUnavailable"), "False"),
}
"""The conditions that Kubernetes itself sets, each with its status on a healthy Kubernetes node."""


def _signals(conditions: tuple[str, ...], taints: tuple[str, ...]) -> HealthSignals:
    """Read the signs of an unhealthy Kubernetes node.

    Raises SettingsError for an invalid entry, for a condition that a healthy Kubernetes node also
    has, and for a taint that belongs to Kubernetes itself.
    """
    pairs = []
    for text in conditions:
        kind, _, status = text.partition("=")
        if not kind.strip("*") or "*" in kind[:-1] or status not in _STATUSES or kind == "Ready":
            remedy = "write TYPE=True, TYPE=False or TYPE=Unknown, with * only at the end; Ready is always watched"
            raise SettingsError(f"{PREFIX}NODE_CONDITIONS has {text!r}; {remedy}")
        for known, good in _OF_A_HEALTHY_NODE.items():
            if status == good and HealthSignals(((kind, status),)).against([{"type": known, "status": good}], ()):
                remedy = "write the full TYPE of the condition, with the status that means unhealthy"
                raise SettingsError(
                    f"{PREFIX}NODE_CONDITIONS has {text!r}, which matches {known}={good}, the condition of a"
                    f" healthy node; {remedy}"
                )
        pairs.append((kind, status))
    for key in taints:
        if "*" in key[:-1]:
            raise SettingsError(f"{PREFIX}NODE_TAINTS has {key!r}; write * only at the end of a key")
        if "node.kubernetes.io/".startswith(key.rstrip("*")) or key.startswith("node.kubernetes.io/"):
            remedy = "remove it, because Kubernetes' own taints, including a cordon, do not describe a node's health"
            raise SettingsError(f"{PREFIX}NODE_TAINTS has {key!r}; {remedy}")
    return HealthSignals(tuple(pairs), taints)

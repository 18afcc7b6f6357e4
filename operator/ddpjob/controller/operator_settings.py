"""The operator's settings: environment variables, which the chart sets from its values."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddpjob.api.types import Json

PREFIX = "DDPJOB_OPERATOR_"
MOST_SHARDS = 10


class SettingsError(ValueError):
    """An environment variable has an invalid value."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One field per variable `DDPJOB_OPERATOR_<FIELD>`."""

    key: bytes
    """Secret of at least 16 bytes that the jobs' tokens derive from. Replicas share it."""
    namespaces: tuple[str, ...] = ()
    """Watched namespaces; empty: all."""
    peer: Json | None = None
    """The operator's pods as the peer of a NetworkPolicy, in JSON; without it jobs get no NetworkPolicy."""
    metrics_peers: tuple[Json, ...] = ()
    """Peers that may reach the coordinators for their metrics, a list in JSON."""
    workers: int = 16
    """Jobs reconciled at the same time."""
    lease_namespace: str = ""
    """Namespace of the Lease for leader election; empty: no election (one replica)."""
    lease_name: str = "ddpjob-operator"
    shards: int = 1
    """Shares into which the namespaces are dealt out, each with a Lease: that many replicas act at the same time."""
    identity: str = "ddpjob-operator"
    address: str = "0.0.0.0"
    """Where health and metrics are served: the pod's own address, IPv4 or IPv6."""
    health_port: int = 8080
    metrics_port: int = 9090
    """0: no metrics."""
    log_level: str = "INFO"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Reads the environment. Raises SettingsError, which names the variable."""

        def text(name: str, default: str) -> str:
            return environment.get(PREFIX + name, default)

        def number(name: str, default: int) -> int:
            value = text(name, str(default))
            if not value.isdigit():
                raise SettingsError(f"{PREFIX}{name} is {value!r}; it must be an integer")
            return int(value)

        def peers(name: str, kind: type, default: str) -> Any:
            value = text(name, "") or default
            try:
                found = json.loads(value)
            except ValueError as error:
                raise SettingsError(f"{PREFIX}{name} is {value!r}; it must be JSON: {error}") from error
            if found is not None and not isinstance(found, kind):
                raise SettingsError(f"{PREFIX}{name} is {value!r}; it must be a JSON {kind.__name__}")
            return found

        key = text("KEY", "").encode()
        if len(key) < 16:
            raise SettingsError(
                f"{PREFIX}KEY must be a secret of at least 16 characters, the same at every start: with another one, "
                "running jobs restart from their checkpoints. The chart generates one and keeps it"
            )
        shards, lease_namespace = number("SHARDS", cls.shards), text("LEASE_NAMESPACE", "")
        if not 1 <= shards <= MOST_SHARDS:
            raise SettingsError(f"{PREFIX}SHARDS is {shards}; it must be from 1 to {MOST_SHARDS}")
        if shards > 1 and not lease_namespace:
            raise SettingsError(f"{PREFIX}SHARDS is {shards}; more than one needs {PREFIX}LEASE_NAMESPACE")
        return cls(
            key=key,
            namespaces=tuple(n.strip() for n in text("NAMESPACES", "").split(",") if n.strip()),
            peer=peers("PEER", dict, "null"),
            metrics_peers=tuple(peers("METRICS_PEERS", list, "[]")),
            workers=number("WORKERS", cls.workers),
            lease_namespace=lease_namespace,
            lease_name=text("LEASE_NAME", cls.lease_name),
            shards=shards,
            identity=text("IDENTITY", os.uname().nodename),
            address=text("ADDRESS", cls.address) or cls.address,
            health_port=number("HEALTH_PORT", cls.health_port),
            metrics_port=number("METRICS_PORT", cls.metrics_port),
            log_level=text("LOG_LEVEL", cls.log_level).upper(),
        )

"""The operator's settings: environment variables, set by the chart's values."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

PREFIX = "DDPJOB_OPERATOR_"


class SettingsError(ValueError):
    """A variable has a value that cannot be used."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One field per variable `DDPJOB_OPERATOR_<FIELD>`."""

    key: bytes
    """Secret of at least 16 bytes from which the jobs' tokens are made. Replicas share it."""
    namespaces: tuple[str, ...] = ()
    """Watched namespaces; none: all."""
    workers: int = 16
    """Jobs looked at at the same time."""
    lease_namespace: str = ""
    """Where the Lease that elects one replica lives; empty: no election (one replica)."""
    lease_name: str = "ddpjob-operator"
    identity: str = "ddpjob-operator"
    health_port: int = 8080
    metrics_port: int = 9090
    """0: none."""
    log_level: str = "INFO"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Raises SettingsError naming the variable."""

        def text(name: str, default: str) -> str:
            return environment.get(PREFIX + name, default)

        def number(name: str, default: int) -> int:
            value = text(name, str(default))
            if not value.isdigit():
                raise SettingsError(f"{PREFIX}{name} is {value!r}; it must be a whole number")
            return int(value)

        key = text("KEY", "").encode()
        if len(key) < 16:
            raise SettingsError(
                f"{PREFIX}KEY must be a secret of at least 16 characters, the same at every start: with another one, "
                "running jobs restart from their checkpoints. The chart makes one and keeps it"
            )
        return cls(
            key=key,
            namespaces=tuple(n.strip() for n in text("NAMESPACES", "").split(",") if n.strip()),
            workers=number("WORKERS", cls.workers),
            lease_namespace=text("LEASE_NAMESPACE", ""),
            lease_name=text("LEASE_NAME", cls.lease_name),
            identity=text("IDENTITY", os.uname().nodename),
            health_port=number("HEALTH_PORT", cls.health_port),
            metrics_port=number("METRICS_PORT", cls.metrics_port),
            log_level=text("LOG_LEVEL", cls.log_level).upper(),
        )

"""The DDPJOB_* variables, which describe the job to a process in one of its pods (table:
docs/protocol.md).

All other modules read the variables through this one. The only exception is `worker.py`, which runs
before the user's program and therefore imports nothing. The variables are read whenever they are
needed, because a launcher changes DDPJOB_FENCE in each round.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields

GRACE_SECONDS = 30.0
"""Kubernetes' default grace period, in seconds, for pods that do not set one."""


class VariableError(ValueError):
    """A DDPJOB_* variable has an unusable value. The message says what to do about it."""


@dataclass(frozen=True)
class JobEnvironment:
    """The values of DDPJOB_CLUSTER, DDPJOB_NAMESPACE and so on. An unset variable has an empty
    value.
    """

    cluster: str
    namespace: str
    name: str
    uid: str
    pod: str
    index: str
    attempt: str
    generation: str
    round: str
    nodes: str
    procs_per_node: str
    gpus: str
    coordinator: str
    """HOST:PORT of the job's coordinator; set in every pod of a job, and empty outside a job."""
    token: str
    fence: str
    """The group that this process belongs to, as GENERATION.ROUND."""
    grace_seconds: str
    checkpoint_dir: str
    checkpoint_url: str
    checkpoint_shared: str
    logs_kept: str
    """Number of pods per slot whose logs are kept next to the checkpoints; empty or 0 if no logs
    are kept.
    """
    snapshot_folder: str
    """Folder in memory where training states outlive the workers; empty if no states are kept in
    memory.
    """
    snapshot_steps: str
    preflight: str
    preload: str
    recovery: str
    rank_order: str
    no_restarts: str
    data_url: str
    data_endpoint: str
    data_region: str
    data_dir: str
    code_url: str
    code_digest: str
    """SHA-256 of the archive at `code_url`, as sha256:HEX."""
    code_endpoint: str
    code_region: str
    code_dir: str
    termination_log: str
    stacks_dir: str
    """Folder in which workers write their Python stacks when they receive `stack_signal.SIGNAL`."""

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> JobEnvironment:
        """Read the variables' current values."""
        return cls(**{field.name: environ.get("DDPJOB_" + field.name.upper(), "") for field in fields(cls)})

    @property
    def shares_checkpoints(self) -> bool | None:
        """Whether all pods see the same checkpoint folder; None if that is unknown."""
        return {"1": True, "0": False}.get(self.checkpoint_shared)

    @property
    def has_several_nodes(self) -> bool:
        """Whether the job has more than one node."""
        return self.nodes not in ("", "1")

    @property
    def group(self) -> tuple[int, int] | None:
        """The group that this process belongs to, as (generation, round).

        None if no launcher started this process. While two groups of a job exist, only the group
        with the higher (generation, round) pair is allowed to write. Raises VariableError if
        DDPJOB_FENCE is malformed.
        """
        if not self.fence:
            return None
        if not (match := re.fullmatch(r"(\d+)\.(\d+)", self.fence)):
            what = "must be GENERATION.ROUND, two whole numbers; unset it, because only the launcher should set it"
            raise VariableError(f"DDPJOB_FENCE={self.fence!r}: {what}")
        return int(match[1]), int(match[2])

    @property
    def order(self) -> tuple[int, int]:
        """The (generation, round) pair in which this process was started; (0, 0) outside a job.

        Without a launcher, this is the pod's own generation and round. Raises VariableError if a
        variable is malformed.
        """
        return self.group or (self.number("generation"), self.number("round"))

    def number(self, field: str) -> int:
        """Return the value of a variable as a whole number; 0 if the variable is unset.

        Raises VariableError if it is not a whole number.
        """
        value: str = getattr(self, field)
        if value and not value.isdecimal():
            what = "must be a whole number; unset it, because only the operator should set it"
            raise VariableError(f"DDPJOB_{field.upper()}={value!r}: {what}")
        return int(value or 0)

    @property
    def grace(self) -> float | None:
        """The pod's grace period in seconds; None outside a job.

        Raises VariableError if DDPJOB_GRACE_SECONDS is not a number.
        """
        try:
            return float(self.grace_seconds) if self.grace_seconds else None
        except ValueError:
            what = "must be a number of seconds; unset it, because only the operator should set it"
            raise VariableError(f"DDPJOB_GRACE_SECONDS={self.grace_seconds!r}: {what}") from None

    @property
    def may_have_snapshots(self) -> bool:
        """Whether any pod of the job may hold training states in memory.

        This is true in every job, even if this pod keeps no states. After a change to the spec, old
        and new pods can have different settings, so all ranks of a job must tell each other which
        states they hold.
        """
        return bool(self.snapshot_folder or self.coordinator)

    @property
    def snapshot_interval(self) -> int | str:
        """Number of steps between two copies of the training state into memory, or "auto"."""
        return int(self.snapshot_steps) if self.snapshot_steps.isdigit() else "auto"

    @property
    def host(self) -> str:
        """The pod's name or, outside a job, the machine's name."""
        return self.pod or socket.gethostname()

    @property
    def is_first(self) -> bool:
        """Whether this process counts as the job's first one.

        The first process is the one with rank 0. If a `command` sets no ranks, the process in the
        pod with index 0 counts as the first one.
        """
        return os.environ.get("RANK", self.index or "0") == "0"

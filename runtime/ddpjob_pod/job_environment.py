"""The DDPJOB_* variables, which describe the job to a process in one of its pods (table:
docs/protocol.md).

Apart from `worker.py`, which runs before the user's program and imports nothing, no other module
reads them. They are read when needed, because a launcher changes DDPJOB_FENCE in each round.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields

GRACE_SECONDS = 30.0
"""Kubernetes' default grace period, which applies if a pod does not set one."""


class VariableError(ValueError):
    """A job variable has an unusable value. The message includes the remedy."""


@dataclass(frozen=True)
class JobEnvironment:
    """The values of the variables. The value of a variable that is not set is an empty string."""

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
    """host:port. Set in every pod of a job, never outside jobs."""
    token: str
    fence: str
    """GENERATION.ROUND of the group that this process belongs to."""
    grace_seconds: str
    checkpoint_dir: str
    checkpoint_url: str
    checkpoint_shared: str
    logs_kept: str
    """Number of pods per slot whose log is kept with the checkpoints; empty or 0 for none."""
    snapshot_folder: str
    """A folder in memory that outlives the workers; empty if states are not kept in memory."""
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
    """SHA-256 of the archive at code_url, as sha256:HEX."""
    code_endpoint: str
    code_region: str
    code_dir: str
    termination_log: str
    stacks_dir: str
    """Folder in which the launcher's workers write their stacks on a signal."""

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> JobEnvironment:
        """Read the variables' current values."""
        return cls(**{field.name: environ.get("DDPJOB_" + field.name.upper(), "") for field in fields(cls)})

    @property
    def shares_checkpoints(self) -> bool | None:
        """Whether all pods see the same checkpoint folder. None if unknown."""
        return {"1": True, "0": False}.get(self.checkpoint_shared)

    @property
    def has_several_nodes(self) -> bool:
        """Whether the job has more than one node."""
        return self.nodes not in ("", "1")

    @property
    def group(self) -> tuple[int, int] | None:
        """This process's group, as (generation, round).

        If a job has two groups, only the group with the higher value may write. None if no launcher
        started this process. Raises VariableError.
        """
        if not self.fence:
            return None
        if not (match := re.fullmatch(r"(\d+)\.(\d+)", self.fence)):
            what = "must be GENERATION.ROUND, two whole numbers; unset it, because only the launcher sets it"
            raise VariableError(f"DDPJOB_FENCE={self.fence!r}: {what}")
        return int(match[1]), int(match[2])

    @property
    def grace(self) -> float | None:
        """The pod's grace period in seconds; None outside a job. Raises VariableError."""
        try:
            return float(self.grace_seconds) if self.grace_seconds else None
        except ValueError:
            what = "must be a number of seconds; unset it, because only the operator sets it"
            raise VariableError(f"DDPJOB_GRACE_SECONDS={self.grace_seconds!r}: {what}") from None

    @property
    def may_have_snapshots(self) -> bool:
        """Whether states may be kept in memory, in this pod or in other pods of the job.

        After a change to the spec, old and new pods may have different settings. So in a job, all
        ranks exchange what they hold.
        """
        return bool(self.snapshot_folder or self.coordinator)

    @property
    def snapshot_interval(self) -> int | str:
        """Steps between two states that are kept in memory, as a number or "auto"."""
        return int(self.snapshot_steps) if self.snapshot_steps.isdigit() else "auto"

    @property
    def host(self) -> str:
        """Name of the pod; outside a job, name of the machine."""
        return self.pod or socket.gethostname()

    @property
    def is_first(self) -> bool:
        """Whether this process has rank 0 or, in a `command` without ranks, its pod has index 0."""
        return os.environ.get("RANK", self.index or "0") == "0"

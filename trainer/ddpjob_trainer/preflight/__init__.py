"""Preflight: can these machines train together? One table before anything is lost, with the culprit and the remedy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True, frozen=True)
class PreflightConfig:
    """Whether the machines are checked before training, and what they are measured by (`python -m ddpjob_trainer preflight`)."""

    run: bool = False
    """Check before training; a check that fails ends the run."""
    join_seconds: float = 30.0
    """How long ranks are waited for; those that have not come by then are named."""
    step_seconds: float = 10.0
    """How long a single check may take; one without an answer by then fails."""
    clock_skew_seconds: float = 1.0
    """Clocks further apart are warned of: lines of different nodes' logs can then not be put in order. NTP holds a hundredth of it."""
    free_gb: float = 1.0
    """Less free space in the checkpoint folder is warned of; twice the largest checkpoint in it counts if that is more."""
    bandwidth_gbs: float = 0.0
    """A slower all-reduce (bus bandwidth in GB/s) between several nodes is warned of; 0: it is only shown."""

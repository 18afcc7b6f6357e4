"""The parts of the tests' simulation that the night uses."""

from __future__ import annotations

import benchmarks.testbed  # noqa: F401  Makes the tests' modules importable.

# isort: split
from simulation.clock import EPOCH_SECONDS, Clock
from simulation.coordinator_port import listen
from simulation.kubelet import NOWHERE, Host, Machines, Pod
from simulation.launcher import Launcher
from simulation.network import Network, Pace
from simulation.training import Training, WorkerRound

__all__ = [
    "EPOCH_SECONDS",
    "NOWHERE",
    "Clock",
    "Host",
    "Launcher",
    "Machines",
    "Network",
    "Pace",
    "Pod",
    "Training",
    "WorkerRound",
    "listen",
]

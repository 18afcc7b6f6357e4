"""Overrides for running the same spec on one machine."""

from __future__ import annotations

import hashlib
import os
import random
import re
import socket
from dataclasses import dataclass

from ddpjob.api.job import DDPJob
from ddpjob.api.job_status import JobStatus
from ddpjob.local.environment import ADDRESS
from ddpjob.objects.platform import Platform

_LOWEST, _HIGHEST = 20000, 32000
"""Below the kernel's ephemeral ports, so that no outgoing connection takes one between choice and use."""


@dataclass(frozen=True, kw_only=True)
class LocalPlatform(Platform):
    """All pods share the loopback address."""

    coordinator_listens_on: str = ADDRESS

    def coordinator_host(self, job: DDPJob, status: JobStatus) -> str:
        return ADDRESS

    def store_host(self, job: DDPJob, status: JobStatus) -> str:
        """This machine by an address that torchrun does not take for its own: else it would host the store, too."""
        return ADDRESS if job.spec.under_torchrun else "0.0.0.0"

    def first_host(self, job: DDPJob, status: JobStatus) -> str:
        return ADDRESS

    def bucket_folder(self, job: DDPJob) -> str:
        """The name of no namespace, with the machine and the folder of runs: a trial run must not continue, nor pass,
        the job of this name in a cluster or in another folder.
        """
        machine = re.sub(r"[^a-z0-9-]", "-", socket.gethostname().lower())
        runs = hashlib.sha256(os.fsencode(str(self.checkpoint_path))).hexdigest()[:8]
        return f"local.{machine}.{runs}/{job.name}"

    @property
    def cluster(self) -> str:
        """The machine: the key is another one in each run."""
        return socket.gethostname()

    def token_secret(self, job: DDPJob) -> str:
        return ""


class NoFreePorts(Exception):
    """Other programs have the ports that coordinators could listen on."""


def free_ports() -> tuple[int, socket.socket]:
    """A port P such that P to P+2 are free, and what keeps other runs from it until it is closed. Raises NoFreePorts.

    A coordinator listens later, and not while it is replaced: runs that start together must not choose the same.
    """
    for _ in range(100):
        port = random.SystemRandom().randrange(_LOWEST, _HIGHEST, 4)
        mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            mark.bind(f"\0ddpjob-ports-{port}")  # No file, and of this network namespace, as ports are.
        except OSError:
            mark.close()
            continue
        if all(_is_free(port + offset) for offset in range(3)):
            return port, mark
        mark.close()
    raise NoFreePorts(
        f"no three neighbouring TCP ports between {_LOWEST} and {_HIGHEST} are free, which a job needs;"
        " end programs that listen there (`ss -ltn` lists them)"
    )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True

"""Overrides platform settings to run the same spec on one machine."""

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
"""Range of ports below the kernel's ephemeral ports, so that an outgoing connection cannot take a
port after it was chosen and before it is used."""


@dataclass(frozen=True, kw_only=True)
class LocalPlatform(Platform):
    """The platform of a single machine, where all pods share the loopback address."""

    coordinator_listens_on: str = ADDRESS

    def coordinator_host(self, job: DDPJob, status: JobStatus) -> str:
        return ADDRESS

    def store_host(self, job: DDPJob, status: JobStatus) -> str:
        """Return the loopback address.

        For a `command`, return an address of this machine that torchrun does not recognize as its
        own, because torchrun would otherwise host the store itself.
        """
        return ADDRESS if job.spec.under_torchrun else "0.0.0.0"

    def first_host(self, job: DDPJob, status: JobStatus) -> str:
        return ADDRESS

    def bucket_folder(self, job: DDPJob) -> str:
        """Return a folder that differs from every namespace's folder.

        Its name contains the machine and the folder of runs. A trial run must neither continue nor
        supersede the job with the same name in a cluster or in another folder.
        """
        machine = re.sub(r"[^a-z0-9-]", "-", socket.gethostname().lower())
        runs = hashlib.sha256(os.fsencode(str(self.checkpoint_path))).hexdigest()[:8]
        return f"local.{machine}.{runs}/{job.name}"

    @property
    def cluster(self) -> str:
        """The machine's name.

        `key_mark`, the default, would not identify the machine, because each run has a different
        key.
        """
        return socket.gethostname()

    def token_secret(self, job: DDPJob) -> str:
        return ""


class NoFreePorts(Exception):
    """Other programs use the ports that coordinators could listen on."""


def free_ports() -> tuple[int, socket.socket]:
    """Return a port P such that P to P+2 are free, and a socket that reserves them.

    The reservation ends when the socket is closed. Raises NoFreePorts. A coordinator starts
    listening later, and does not listen while it is being replaced. Without the socket, runs that
    start together could therefore choose the same ports.
    """
    for _ in range(100):
        port = random.SystemRandom().randrange(_LOWEST, _HIGHEST, 4)
        mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            # An abstract socket does not create a file, and belongs to the network namespace, as
            # ports do.
            mark.bind(f"\0ddpjob-ports-{port}")
        except OSError:
            mark.close()
            continue
        if all(_is_free(port + offset) for offset in range(3)):
            return port, mark
        mark.close()
    raise NoFreePorts(
        f"a job needs three consecutive free TCP ports between {_LOWEST} and {_HIGHEST}, but none are free; stop"
        " programs that listen there (`ss -ltn` lists them)"
    )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True

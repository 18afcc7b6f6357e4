"""Settings for pods that run on a single machine, and a function that finds free ports for a
coordinator.
"""

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
"""The range from which ports are chosen. It lies below the kernel's ephemeral ports, because an
outgoing connection could take an ephemeral port before the coordinator listens on it.
"""


@dataclass(frozen=True, kw_only=True)
class LocalPlatform(Platform):
    """The platform of a single machine, where all pods share the loopback address."""

    coordinator_listens_on: str = ADDRESS

    def coordinator_host(self, job: DDPJob, status: JobStatus) -> str:
        return ADDRESS

    def store_host(self, job: DDPJob, status: JobStatus) -> str:
        """Return the loopback address. For a `command`, return an address of this machine that
        torchrun does not recognize as local.

        If torchrun recognized the address as local, it would host the store itself.
        """
        return ADDRESS if job.spec.under_torchrun else "0.0.0.0"

    def first_host(self, job: DDPJob, status: JobStatus) -> str:
        return ADDRESS

    def bucket_folder(self, job: DDPJob) -> str:
        """Return the folder in a bucket that belongs to this job on this machine.

        A trial run must neither continue nor supersede a job with the same name in a cluster or in
        another runs folder. The folder's name therefore contains the machine's name and a digest of
        the runs folder. No namespace's folder has a name of this form.
        """
        machine = re.sub(r"[^a-z0-9-]", "-", socket.gethostname().lower())
        runs = hashlib.sha256(os.fsencode(str(self.checkpoint_path))).hexdigest()[:8]
        return f"local.{machine}.{runs}/{job.name}"

    @property
    def cluster(self) -> str:
        """The name of this machine, in place of a cluster's identity.

        The default, `key_mark`, would not identify the machine, because each run has a new operator
        key.
        """
        return socket.gethostname()

    def token_secret(self, job: DDPJob) -> str:
        return ""


class NoFreePorts(Exception):
    """Other programs use the ports that coordinators could listen on."""


def free_ports() -> tuple[int, socket.socket]:
    """Return a port P such that P, P+1 and P+2 are free, and a socket that reserves these ports.

    The reservation ends when the socket is closed. A coordinator starts to listen only later, and
    does not listen while it is being replaced. Without the reservation, two runs that start at the
    same time could therefore choose the same ports. Raises NoFreePorts.
    """
    for _ in range(100):
        port = random.SystemRandom().randrange(_LOWEST, _HIGHEST, 4)
        mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            # Reserve the ports by binding an abstract socket, which creates no file and, like the
            # ports, belongs to the network namespace.
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

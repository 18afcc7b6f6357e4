"""Simulates a host that loses its network, with groups whose nodes have their own network
namespaces.

Needs root, `ip` and `bridge`. All namespaces are on one bridge, which has its own namespace, so
that this machine's network is not affected. All hosts share the machine's clock.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.recovery.cases import Backend, Case, System, recovery
from benchmarks.recovery.groups import START_SECONDS, Fast, Group, NotRecovered, Shape, training
from benchmarks.recovery.tables import Sample
from benchmarks.recovery.trace.systems import TUNED, TorchFT
from benchmarks.recovery.trace.torchft_packages import NotInstalled

COORDINATOR = 0
"""The host of the coordinator, or of torchft's lighthouse. The nodes' hosts follow."""


class Hosts:
    """Hosts 0, 1, ... with the addresses 10.78.0.1, 10.78.0.2, ...

    `name` distinguishes the hosts of groups that one process runs at the same time.
    """

    def __init__(self, number: int, name: str = "") -> None:
        self._prefix, self._number = f"cut{os.getpid()}{name}", number

    def address(self, host: int) -> str:
        """Return the host's address."""
        return f"10.78.0.{host + 1}"

    def command(self, host: int, command: list[str]) -> list[str]:
        """Return the command that runs `command` on the host.

        The host's name is its address, because torchft publishes the name.
        """
        enter = ["ip", "netns", "exec", f"{self._prefix}h{host}", "unshare", "--uts"]
        named = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'
        return [*enter, "sh", "-c", named, self.address(host), *command]

    def cut(self, host: int) -> None:
        """Have the bridge drop the host's packets. Neither side is notified.

        Taking the link down is not an option, because the kernel reports a link as up only once a
        second.
        """
        _run(f"bridge -n {self._prefix}b link set dev port{host} state 0")

    def heal(self, host: int) -> None:
        """Have the bridge forward the host's packets again."""
        _run(f"bridge -n {self._prefix}b link set dev port{host} state 3")

    def make(self) -> None:
        """Create the bridge and the hosts."""
        _run(f"ip netns add {self._prefix}b")
        _run(f"ip -n {self._prefix}b link add br0 type bridge")
        _run(f"ip -n {self._prefix}b link set br0 up")
        for host in range(self._number):
            name = f"{self._prefix}h{host}"
            _run(f"ip netns add {name}")
            _run(f"ip -n {name} link add eth0 type veth peer name port{host} netns {self._prefix}b")
            _run(f"ip -n {self._prefix}b link set port{host} master br0 up")
            _run(f"ip -n {name} address add {self.address(host)}/24 dev eth0")
            _run(f"ip -n {name} link set eth0 up")
            _run(f"ip -n {name} link set lo up")

    def remove(self) -> None:
        """Remove everything."""
        for name in (f"{self._prefix}b", *(f"{self._prefix}h{host}" for host in range(self._number))):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotRecovered(f"{command}: {done.stderr.strip()}")


class OnHosts(Group):
    """A group with a host per node. `hosts` must be set before it starts."""

    hosts: Hosts

    def host_of(self, name: str) -> int:
        """Return the host of a process."""
        return int(name.split("-")[1]) + 1 if name.startswith("node-") else COORDINATOR

    def cut(self, name: str) -> float:
        """Disconnect a node's host, and return the Unix time just before."""
        moment = time.time()
        self.hosts.cut(self.host_of(name))
        return moment

    def _launch(self, name: str, command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        host = self.host_of(name)
        own = {"POD_IP": self.hosts.address(host), "GLOO_SOCKET_IFNAME": "eth0", **self._places()}
        words = [word.replace("127.0.0.1", self._address(word, host)) for word in command]
        return super()._launch(name, self.hosts.command(host, words), {**env, **own})

    def _address(self, word: str, host: int) -> str:
        """Return the address that replaces 127.0.0.1 in a word of the command."""
        return self.hosts.address(COORDINATOR if word.startswith("--rdzv-endpoint") else host)

    def _places(self) -> dict[str, str]:
        """Return the variables with the coordinator's address."""
        raise NotImplementedError


class FastOnHosts(OnHosts, Fast):
    """Mode Fast on hosts."""

    def _places(self) -> dict[str, str]:
        return {"DDPJOB_COORDINATOR": f"{self.hosts.address(COORDINATOR)}:{self.port}"}

    def _launch(self, name: str, command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        return OnHosts._launch(self, name, command, {**self._identity(name), **env})

    def spares_ready(self) -> int:
        # The coordinator's port cannot be reached from here.
        log = (self.folder / "coordinator-0-0.log").read_text(errors="replace")
        return log.count("'t': 'ready'") - self.shape.nodes


class TorchFTOnHosts(OnHosts, TorchFT):
    """torchft on hosts, as shipped."""

    def __init__(self, folder: Path, shape: Shape, options: tuple[str, ...] = ()) -> None:
        super().__init__(folder, options)
        self.shape = shape

    def start(self) -> None:
        self.start_lighthouse()
        self.wait("the lighthouse starts", lambda: "Lighthouse listening" in self._said(), START_SECONDS)
        Group.start(self)

    def _said(self) -> str:
        return (self.folder / "lighthouse.log").read_text(errors="replace")

    def _places(self) -> dict[str, str]:
        return {"TORCHFT_LIGHTHOUSE": f"http://{self.hosts.address(COORDINATOR)}:{self._port}"}


class TunedTorchFTOnHosts(TorchFTOnHosts):
    """torchft on hosts with a lighthouse that notices a loss ten times as fast.

    Its collectives time out after a second, because they do not notice a silent peer.
    """

    settings = TUNED

    def __init__(self, folder: Path, shape: Shape, options: tuple[str, ...] = ()) -> None:
        super().__init__(folder, shape, (*options, "--timeout", "1"))


KINDS: dict[str, type[OnHosts]] = {
    "fast-spare-cut": FastOnHosts,
    "torchft-cut": TorchFTOnHosts,
    "torchft-tuned-cut": TunedTorchFTOnHosts,
}


@contextmanager
def on_hosts(name: str, shape: Shape) -> Iterator[OnHosts]:
    """Provide the group of a case, once it trains. Raises NotRecovered."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("bridge") is None:
        raise NotRecovered("network namespaces need root, ip and bridge")
    hosts = Hosts(shape.nodes + shape.spares + 1)

    def make(folder: Path) -> OnHosts:
        group: OnHosts = KINDS[name](folder, shape)  # type: ignore[call-arg, arg-type]
        group.hosts = hosts
        return group

    try:
        hosts.make()
        with training(make) as group:
            yield group
    except NotInstalled as error:
        raise NotRecovered(str(error)) from error
    finally:
        hosts.remove()


def cut(case: Case, backend: Backend, round_: int) -> Iterator[Sample]:
    """Disconnect a node's host. A spare takes over, or torchft continues without the node."""
    with on_hosts(case.name, case.shape) as group:
        node, victim = group.pick(group.settle(), round_)
        moment = group.cut(node)
        world = case.shape.nodes if case.shape.spares else case.shape.nodes - 1
        try:
            seconds, where = recovery(group, moment, world, backend.patience)
            yield case.sample(backend, victim, round_, seconds, phases=where)
        except NotRecovered as error:
            yield case.sample(backend, victim, round_, None, outcome=str(error))


CUTS = (
    Case("fast-spare-cut", 1.5, cut, System.FAST, Shape(nodes=3, minimum=3, spares=1)),
    Case("torchft-cut", None, cut, System.STOCK, Shape(nodes=3, minimum=1)),
    Case("torchft-tuned-cut", None, cut, System.STOCK, Shape(nodes=3, minimum=1)),
)
"""Cases that run only if they are selected by name, because they need root and torchft."""

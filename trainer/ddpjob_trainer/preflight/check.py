"""What a check is: a look on every rank, and a judgement on rank 0 of what all of them saw."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from ddpjob_trainer.config import Config
    from ddpjob_trainer.group import Group

T = TypeVar("T")


class Status(enum.StrEnum):
    """How a check ended, worst first."""

    FAIL = "FAIL"
    WARN = "WARN"
    SKIPPED = "SKIPPED"
    OK = "OK"


@dataclass(frozen=True)
class Result:
    """One row of the table. `culprit`: names of nodes or ranks."""

    check: str
    status: Status
    value: str
    culprit: tuple[str, ...] = ()
    remedy: str = ""


@dataclass(frozen=True)
class Context:
    """What a look knows. `threads`: of torch in this process; `token`: a word that is this life's alone."""

    config: Config
    group: Group
    threads: int
    token: str


@dataclass(frozen=True)
class Nodes:
    """Which rank is on which node; a node's leader is its first rank."""

    leader: dict[int, int]
    name: dict[int, str]

    @classmethod
    def of(cls, hellos: dict[int, dict[str, Any]]) -> Nodes:
        """From each rank's leader and host; nodes of one name (several on one machine) are told apart by their leader."""
        leader = {rank: int(hello["leader"]) for rank, hello in hellos.items()}
        hosts = {rank: str(hello["host"]) for rank, hello in hellos.items()}
        by_host: dict[str, set[int]] = {}
        for rank, host in hosts.items():
            by_host.setdefault(host, set()).add(leader[rank])
        return cls(leader, {r: host if len(by_host[host]) == 1 else f"{host} (rank {leader[r]})" for r, host in hosts.items()})

    @property
    def leaders(self) -> list[int]:
        """Each node's first rank among those present."""
        first: dict[int, int] = {}
        for rank in sorted(self.leader):
            first.setdefault(self.leader[rank], rank)
        return sorted(first.values())

    def names(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """The ranks' nodes, each once."""
        return tuple(dict.fromkeys(self.name[rank] for rank in sorted(ranks)))

    def ranks(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """`rank 3 on node-b`."""
        return tuple(f"rank {rank} on {self.name[rank]}" for rank in sorted(ranks))


@dataclass(frozen=True)
class Seen(Generic[T]):
    """What was seen, by rank, and what it is judged by."""

    values: dict[int, T]
    nodes: Nodes
    config: Config
    world: int


@dataclass(frozen=True)
class Check(Generic[T]):
    """A check. `kind`: dataclass of what `look` returns; `per_node`: only each node's first rank looks."""

    name: str
    kind: type[T]
    look: Callable[[Context], T]
    judge: Callable[[Seen[T]], Result]
    per_node: bool = False


def odd(values: dict[int, str]) -> tuple[str, list[int]]:
    """The value that most ranks have (of two as frequent ones, the lowest rank's), and the ranks that have another."""
    frequent = list(values.values())
    norm = max((values[rank] for rank in sorted(values)), key=frequent.count)
    return norm, [rank for rank in sorted(values) if values[rank] != norm]


def gigabytes(size: float) -> str:
    """`1.5 GiB`."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"

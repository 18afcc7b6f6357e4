"""`[--config FILE] [key=value ...]`, as training and several commands take it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ddpjob_trainer.config.config import Config, load
from ddpjob_trainer.errors import ConfigError


def take_option(arguments: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """The value of `name VALUE` or `name=VALUE` (the last one counts), and the other arguments. Raises ConfigError."""
    value: str | None = None
    others: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        if argument == name:
            value = next(remaining, None)
            if value is None:
                raise ConfigError(f"{name}: its value is missing; write {name} VALUE")
        elif argument.startswith(f"{name}="):
            value = argument.removeprefix(f"{name}=")
        else:
            others.append(argument)
    return value, others


def wants_help(arguments: Sequence[str]) -> bool:
    """Whether they ask how the command is called."""
    return "--help" in arguments or "-h" in arguments


def without_local_rank(arguments: Sequence[str]) -> list[str]:
    """The arguments without `--local-rank N` or `--local_rank=N`, which torch.distributed.launch appends.

    It is LOCAL_RANK, unless the launcher has set that. Raises ConfigError.
    """
    others = list(arguments)
    for name in ("--local-rank", "--local_rank"):
        number, others = take_option(others, name)
        if number is not None:
            if not number.isdigit():
                raise ConfigError(f"{name}: {number!r} is not the number of a rank; torch.distributed.launch sets it")
            os.environ.setdefault("LOCAL_RANK", number)
    return others


def read_settings(arguments: Sequence[str]) -> Config:
    """The configuration of `[--config FILE] [key=value ...]`.

    Raises ConfigError naming the key and the remedy.
    """
    file, values = take_option(arguments, "--config")
    return load(file, values)

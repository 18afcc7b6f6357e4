"""The arguments `[--config FILE] [key=value ...]`, which training and several commands take."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ddpjob_trainer.config.config import Config, load
from ddpjob_trainer.errors import ConfigError


def take_option(arguments: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """Return the value of the option `name`, and the other arguments.

    The option is written `NAME VALUE` or `NAME=VALUE`. The value is None if the option is missing,
    and the last one if the option is repeated. Raises ConfigError if the option lacks a value.
    """
    value: str | None = None
    others: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        if argument == name:
            value = next(remaining, None)
            if value is None:
                raise ConfigError(f"{name}: the value is missing; write {name} VALUE")
        elif argument.startswith(f"{name}="):
            value = argument.removeprefix(f"{name}=")
        else:
            others.append(argument)
    return value, others


def wants_help(arguments: Sequence[str]) -> bool:
    """Return whether the arguments ask for help."""
    return "--help" in arguments or "-h" in arguments


def without_local_rank(arguments: Sequence[str]) -> list[str]:
    """Remove `--local-rank N` or `--local_rank=N`, which torch.distributed.launch appends.

    Return the other arguments. Set the environment variable LOCAL_RANK to N, unless the launcher
    has already set that variable. Raises ConfigError if N is not a number.
    """
    others = list(arguments)
    for name in ("--local-rank", "--local_rank"):
        number, others = take_option(others, name)
        if number is not None:
            if not number.isdigit():
                raise ConfigError(
                    f"{name}={number}: must be a rank number; leave this option out, because "
                    "torch.distributed.launch sets it"
                )
            os.environ.setdefault("LOCAL_RANK", number)
    return others


def read_settings(arguments: Sequence[str]) -> Config:
    """Return the configuration described by `[--config FILE] [key=value ...]`.

    Raises a ConfigError that names the key and the remedy.
    """
    file, values = take_option(arguments, "--config")
    return load(file, values)

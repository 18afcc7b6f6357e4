"""`[--config FILE] [key=value ...]`, as training and several commands take it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddpjob_trainer.errors import ConfigError

if TYPE_CHECKING:
    from ddpjob_trainer.config import Config


def take_option(arguments: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """The value of `name VALUE` or `name=VALUE` (the last one counts), and the arguments without it. Raises ConfigError."""
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


def read_settings(arguments: Sequence[str]) -> Config:
    """The configuration of `[--config FILE] [key=value ...]`. Raises ConfigError naming the key and the remedy."""
    from ddpjob_trainer import config

    file, values = take_option(arguments, "--config")
    return config.load(file, values)

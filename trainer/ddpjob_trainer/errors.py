"""Errors whose message is written for the person who can act on it."""

from __future__ import annotations

import sys
from types import TracebackType


class TrainerError(Exception):
    """Something the user can put right; the message says what was wrong, where, and what to write or do instead."""


class ConfigError(TrainerError):
    """A key, a value or a configuration file is wrong."""


class DataError(TrainerError):
    """A data set is missing, empty or damaged."""


class CheckpointError(TrainerError):
    """A checkpoint folder or file cannot be used."""


class FencedError(CheckpointError):
    """A newer life of the job has the checkpoint folder: this process must end, and a restart of it would be the newer one's business."""


class RendezvousError(TrainerError):
    """The ranks cannot find each other, or one of them ended."""


class PreflightError(TrainerError):
    """The machines cannot train together as they are."""


def first_line(error: Exception) -> str:
    """What an error says, without the lines that follow; its kind when it says nothing."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


class TrainingError(TrainerError):
    """Training cannot go on, for example because the loss is not finite."""


class LedgerError(TrainerError):
    """The ledger shows that samples were lost or repeated, or cannot be read."""


def install_hook() -> None:
    """Let a TrainerError that reaches the top print its one sentence instead of a stack of frames; the exit code stays 1."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, TrainerError):
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            previous(kind, error, trace)

    sys.excepthook = hook

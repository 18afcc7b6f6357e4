"""Errors whose messages are written for the person who can act on them."""

from __future__ import annotations

import sys
from types import TracebackType

from ddpjob_pod.job_environment import JobEnvironment


class TrainerError(Exception):
    """A problem that the user can fix.

    The message states what is wrong, where, and what to write or do instead.
    """


class ConfigError(TrainerError):
    """A key, a value or a configuration file is invalid."""


class DeviceError(TrainerError):
    """This machine lacks an accelerator that the configuration needs; a different machine may have
    it.
    """


class DataError(TrainerError):
    """A data set is missing, empty or damaged."""


class CheckpointError(TrainerError):
    """A checkpoint folder or file cannot be used."""


class FencedError(CheckpointError):
    """A newer incarnation of the job owns the checkpoint folder, so this process must end.

    The newer incarnation decides whether to restart.
    """


class FolderTakenError(CheckpointError):
    """Another job uses the checkpoint folder, so this job must not start."""


class RendezvousError(TrainerError):
    """The ranks cannot find each other, or a rank has ended."""


class PreflightError(TrainerError):
    """The machines cannot train together in their current state."""


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its class name if the message is empty."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


class TrainingError(TrainerError):
    """Training cannot continue, for example because the loss is not finite."""


class LedgerError(TrainerError):
    """The ledger cannot be read or written, or it shows that samples were lost or repeated."""


EXIT_USAGE, EXIT_CONFIGURATION = 2, 78
"""Exit codes for an invalid configuration. EXIT_USAGE is argparse's code, and EXIT_CONFIGURATION is
EX_CONFIG from sysexits.h. EXIT_CONFIGURATION is also the code if another job uses the checkpoint
folder.
"""


def exit_code(error: BaseException) -> int:
    """Return the exit code for an error that ends the program.

    In a job's pod, the exit code for an invalid configuration is 78; elsewhere, it is 2. If a
    program in a pod exits with 78 before its first step, the job fails at once and shows the
    message, because a retry would not help.
    """
    if isinstance(error, FolderTakenError):
        return EXIT_CONFIGURATION
    if not isinstance(error, ConfigError):
        return 1
    return EXIT_CONFIGURATION if JobEnvironment.read().pod else EXIT_USAGE


class StartRefused(SystemExit):
    """Ends a program that cannot start as configured, with the exit code `code`.

    The message appears in the job's status.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def install_hook() -> None:
    """Make Python print an uncaught TrainerError as one line. The exit code remains 1."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, TrainerError):
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            previous(kind, error, trace)

    sys.excepthook = hook

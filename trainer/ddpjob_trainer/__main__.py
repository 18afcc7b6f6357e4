"""The entry point `python -m ddpjob_trainer`, which trains, or runs the command in its first
argument.

Usage: `[COMMAND] [--config FILE] [key=value ...]`. `commands.dispatch` lists the commands.
"""

from __future__ import annotations

import faulthandler
import os
import sys

from ddpjob_pod.late_dynamo import uncollected

from ddpjob_trainer.commands.dispatch import run
from ddpjob_trainer.errors import ConfigError, FolderTakenError, StartRefused, exit_code, install_hook
from ddpjob_trainer.lifecycle import fast_exit

_EXTRA = ("torch", "torchvision", "numpy", "simplejpeg", "PIL", "fsspec", "sklearn", "matplotlib", "rich", "psutil",
          "prometheus_client")  # fmt: skip
"""Import names of the packages that the `trainer` extra installs. An image may lack some of them.
"""
_INSTALL = "pip install '.[trainer]' in the checkout of DDPJob"
"""How to install these packages, worded as in ddpjob/missing_package.py, which the trainer must not
import.
"""


def main() -> int:
    """Run the command line and return the exit code.

    Raises TrainerError with a message for the user, and StartRefused if the arguments are invalid
    or another job is using the checkpoint folder.
    """
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        # torch's `record` enables faulthandler too. But importing `record` imports torch, which
        # would delay --help by seconds.
        faulthandler.enable(all_threads=True)
        return _main()
    with uncollected(keep=True):
        from torch.distributed.elastic.multiprocessing.errors import record

    return record(_main)() or 0


def _main() -> int:
    install_hook()
    try:
        return _run(sys.argv[1:])
    except (ConfigError, FolderTakenError) as error:
        raise _refused(error) from None
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        needs = f"ddpjob_trainer needs the package {error.name}; run {_INSTALL}"
        raise _refused(ConfigError(needs)) from None


def _refused(error: ConfigError | FolderTakenError) -> StartRefused:
    print(f"error: {error}", file=sys.stderr, flush=True)
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        # torch's `record` ignores SystemExit, so record the error here.
        get_error_handler().record_exception(error)
    return StartRefused(f"{error}", fast_exit.with_code(exit_code(error)))


def _run(arguments: list[str]) -> int:
    if any(argument.partition("=")[0] == "--spawn" for argument in arguments):
        from ddpjob_trainer.commands import spawn_ranks

        return spawn_ranks.main(arguments)
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())

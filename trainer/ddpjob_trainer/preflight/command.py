"""`python -m ddpjob_trainer preflight [--json FILE] [--config FILE] [key=value ...]` checks all
ranks, or a single rank alone.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from ddpjob_pod import late_dynamo

from ddpjob_trainer.config.command_line import read_settings, take_option, wants_help
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import ConfigError, PreflightError
from ddpjob_trainer.lifecycle import fast_exit
from ddpjob_trainer.preflight.results import PreflightReport

_LINGER_SECONDS = 10.0


def main(arguments: list[str]) -> int:
    """Run the checks, and return 0. Rank 0 prints the table."""
    if wants_help(arguments):
        print(__doc__)
        return 0
    name, rest = take_option(arguments, "--json")
    config = read_settings(rest)
    if name is not None and not Path(name).absolute().parent.is_dir():
        raise ConfigError(f"--json {name}: the folder does not exist; use a file in an existing folder")

    def publish(report: PreflightReport) -> None:
        report.print()
        if name is not None:
            report.write(Path(name))

    late_dynamo.put_off()
    fast_exit.leave_fast()  # A thread that waits for a dead mount must not keep the process alive.
    from ddpjob_trainer.preflight.conduct import conduct

    try:
        failure = conduct(config, Group.from_env(), publish)
    except PreflightError:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            # torchrun ends all ranks when one exits, so wait until rank 0 has printed the table.
            time.sleep(_LINGER_SECONDS)
        raise
    if failure:
        raise PreflightError(failure)
    return fast_exit.with_code(0)

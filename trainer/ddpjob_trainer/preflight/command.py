"""`python -m ddpjob_trainer preflight [--json FILE] [--config FILE] [key=value ...]`: on all ranks of a launcher, or alone."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ddpjob_trainer import fast_start, leaving
from ddpjob_trainer.command_line import read_settings, take_option
from ddpjob_trainer.errors import ConfigError, PreflightError
from ddpjob_trainer.group import Group
from ddpjob_trainer.preflight.flight import conduct
from ddpjob_trainer.preflight.report import Report

_LINGER_SECONDS = 10.0


def main(arguments: list[str]) -> int:
    """Check; rank 0 prints the table. Returns 0.

    Raises PreflightError on every rank when a check failed, so that a job's status says why; ConfigError for a wrong command line.
    """
    if "--help" in arguments or "-h" in arguments:
        print(__doc__)
        return 0
    name, rest = take_option(arguments, "--json")
    config = read_settings(rest)
    if name is not None and not Path(name).absolute().parent.is_dir():
        raise ConfigError(f"--json {name}: its folder does not exist; give a file in one that does")

    def publish(report: Report) -> None:
        report.show()
        if name is not None:
            report.write(Path(name))

    fast_start.install()
    leaving.leave_fast()  # A thread that waits for a dead mount must not keep the process.
    try:
        verdict = conduct(config, Group.from_env(), publish)
    except PreflightError:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            time.sleep(_LINGER_SECONDS)  # torchrun ends all ranks when one leaves: rank 0's table must be out before.
        raise
    if verdict.failed:
        raise PreflightError(verdict.sentence)
    return leaving.with_code(0)

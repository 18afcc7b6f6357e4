"""`python -m ddpjob_trainer preflight [--json FILE] [--config FILE] [key=value ...]`: on all ranks of a launcher, or alone."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from ddpjob_trainer import fast_start, leaving
from ddpjob_trainer.command_line import read_settings, take_option
from ddpjob_trainer.errors import PreflightError
from ddpjob_trainer.group import Group
from ddpjob_trainer.preflight.flight import conduct

_LINGER_SECONDS = 10.0


def main(arguments: list[str]) -> int:
    """Check; rank 0 prints the table. Returns 0 when nothing failed, 1 when something did, on every rank. Raises TrainerError."""
    if "--help" in arguments or "-h" in arguments:
        print(__doc__)
        return 0
    json_file, rest = take_option(arguments, "--json")
    config = read_settings(rest)
    fast_start.install()
    leaving.leave_fast()  # A thread that waits for a dead mount must not keep the process.
    try:
        verdict = conduct(config, Group.from_env())
    except PreflightError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            time.sleep(_LINGER_SECONDS)  # torchrun ends all ranks when one leaves: rank 0's table must be out before.
        return leaving.with_code(1)
    if verdict.report is not None:
        verdict.report.show()
        if json_file is not None:
            verdict.report.write(Path(json_file))
    return leaving.with_code(1 if verdict.failed else 0)

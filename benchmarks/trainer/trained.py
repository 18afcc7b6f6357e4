"""Runs the trainer's command line, in which MODEL `tiny` replaces the trainer's model.

python -m benchmarks.trainer.trained MODEL KEY=VALUE ...
"""

from __future__ import annotations

import sys

from ddpjob_trainer import __main__, train

from benchmarks.trainer.models_of_cases import TINY, tiny


def main() -> int:
    """Run the trainer, and return its exit code."""
    model, *arguments = sys.argv[1:]
    if model == TINY:
        train.build_model = lambda config, shape, classes, *_: tiny(classes)
    return __main__.run(arguments)


if __name__ == "__main__":
    sys.exit(main())

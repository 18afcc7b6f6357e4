"""python trained.py MODEL key=value ...: the trainer, on its own way from the command line on; MODEL `tiny` is put in place of its own."""

from __future__ import annotations

import sys

from ddpjob_trainer import __main__, train
from models_of_cases import TINY, tiny


def main() -> int:
    """Its exit code."""
    model, *arguments = sys.argv[1:]
    if model == TINY:
        train.build_model = lambda config, shape, classes, *_: tiny(classes)
    return __main__.run(arguments)


if __name__ == "__main__":
    sys.exit(main())

"""The project's benchmarks, to be run in the checkout: `python -m benchmarks.recovery --help`."""

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]

"""The project's benchmarks, run from the checkout, for instance `python -m benchmarks.recovery --help`."""

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]

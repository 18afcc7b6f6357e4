"""Measures one operator with very many jobs: `python -m benchmarks.scale --help`."""

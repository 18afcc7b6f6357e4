"""The coordinator of one job. It admits members, forms rounds, finds out why they break, and
reports.

The modules that make decisions neither open sockets nor read the clock, so tests can run them step
by step. Only `server` does both. The package needs only the standard library.
"""

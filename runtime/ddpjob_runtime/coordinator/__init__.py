"""The coordinator of one job. It admits members, forms rounds, finds out why they break, and
reports.

The modules that decide open no sockets and read no clock, so tests can run them step by step. Only
`server` opens sockets and reads the clock. The package needs only the standard library.
"""

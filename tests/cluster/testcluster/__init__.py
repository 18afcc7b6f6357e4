"""A real Kubernetes with N real nodes in network namespaces of one Linux machine, without Docker.

`python -m testcluster up|down|status|env|build` with `tests` and `tests/cluster` on PYTHONPATH, or `Cluster` in Python.
"""

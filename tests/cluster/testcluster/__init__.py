"""A real Kubernetes cluster with N nodes in network namespaces of one Linux machine, without
Docker.

Use `python -m testcluster up|down|status|env|build` with `tests` and `tests/cluster` on PYTHONPATH,
or `Cluster` in Python.
"""

"""The Kubernetes half of the operator against a small API server over real HTTP, in virtual time.

The server (api_server.py) answers from the simulation's store; its faults are those of HTTP:
conflicts, throttling, errors of 5xx,
answers that never come although the server has acted, connections that break, watches that end,
that have a gap, or that expired.
"""

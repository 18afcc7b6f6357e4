"""The Kubernetes half of the operator against a small API server over real HTTP, in virtual time.

The server (api_server.py) answers from the simulation's store. It injects HTTP faults: conflicts,
throttling, 5xx errors, lost responses to completed requests, broken connections, and watches that
end, have gaps or expire.
"""

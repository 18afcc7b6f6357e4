"""The connection between a process in a pod and its job: variables, requests to the coordinator,
memory and signals.

Scripts, the launcher and the built-in trainer use this package. The package needs only Python 3.9
and the standard library, so it runs in any image, and also outside a job. A module belongs here
only if at least two of these three users need it. Why:
docs/decisions/0021-the-trainer-is-a-script.md.
"""

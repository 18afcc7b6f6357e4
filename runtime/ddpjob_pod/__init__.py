"""What a process in a job's pod has from its job. Scripts, the launcher and the built-in trainer stand on it.

It needs only Python 3.9 and the standard library, so it runs in any image, and outside a job. It
contains what at least two of these three need. Why: docs/decisions/0021-the-trainer-is-a-script.md.
"""

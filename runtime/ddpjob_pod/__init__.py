"""What a process in a job's pod has from its job. Scripts, the launcher and the built-in trainer stand on it.

Python 3.9 and the standard library: it runs in any image, and outside of a job as well. It holds
what at least two of the three need. Why: docs/decisions/0021-the-trainer-is-a-script.md.
"""

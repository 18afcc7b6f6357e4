"""Gives a process in a job's pod what its job provides: variables, posts, memory, signals.

Scripts, the launcher and the built-in trainer use it. It needs only Python 3.9 and the standard
library, so it runs in any image, and outside a job. It contains only code that at least two of the
three need. Why: docs/decisions/0021-the-trainer-is-a-script.md.
"""

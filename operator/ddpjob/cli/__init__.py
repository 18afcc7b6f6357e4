"""The `ddpjob` command: arguments, output, and the display of a run.

The work itself is done in `client`.
"""

"""The command `ddpjob`: arguments, output, and the display of a run.

The work itself is done in `client`.
"""

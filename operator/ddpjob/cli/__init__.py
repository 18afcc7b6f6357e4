"""The command `ddpjob`: arguments, output, and the display of a run.

Its work is done in `client`.
"""

"""The command `ddpjob`: arguments, what is printed, and the display of a run. What it does is in `client`."""

"""The trainer: PyTorch training on any number of ranks, which may change at every restart.

It knows nothing of Kubernetes. `train` holds the loop, the packages are its rooms, and `python -m
ddpjob_trainer --help` lists the commands.
"""

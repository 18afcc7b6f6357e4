"""The trainer: PyTorch training on any number of ranks, which may change at each restart.

The trainer does not depend on Kubernetes. `train` contains the loop, and the packages contain its
parts. `python -m ddpjob_trainer --help` lists the commands.
"""

"""The trainer: PyTorch training over any number of ranks that may change at every restart. Knows nothing of Kubernetes.

`train` holds the loop; the packages are its rooms, and `python -m ddpjob_trainer --help` lists what there is to run.
"""

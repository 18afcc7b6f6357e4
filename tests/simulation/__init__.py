"""A Kubernetes in memory in which production code runs on both sides: the operator's and the
coordinator's.

One clock drives it all. The surroundings of that code are simulated: API server, scheduler,
kubelets, network, launchers and the training script. A seed decides latencies and faults, so a
story can be replayed; see README.md.
"""

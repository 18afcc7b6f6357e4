"""A simulated Kubernetes cluster in memory.

The operator and the coordinator run their production code. Everything around them is simulated and
driven by one clock: API server, scheduler, kubelets, network, launchers and the training script. A
seed decides latencies and faults, so a story can be replayed; see README.md.
"""

"""The main process of a node's container: torchrun, driven by the coordinator.

Starts the workers of each round, reports their failures, ends them when the round is over.
"""

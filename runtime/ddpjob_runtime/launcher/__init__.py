"""The main process of a node's container: torchrun, controlled by the coordinator.

The launcher starts the workers of each round, reports their failures, and ends them when the round
is over.
"""

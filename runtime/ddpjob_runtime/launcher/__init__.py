"""The main process of a node's container: torchrun, controlled by the coordinator.

The launcher starts the workers of each round, reports the workers' failures, and ends the workers
when the round is over.
"""

"""The main process of a node's container: torchrun, controlled by the coordinator.

The launcher starts the workers of each round and reports their failures. It ends the workers when
the round is over.
"""

"""Backends for three kinds of jobs: in a cluster, on this machine, and deleted jobs whose records
are in their checkpoint folders.
"""

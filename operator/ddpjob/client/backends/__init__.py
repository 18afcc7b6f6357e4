"""Backends for jobs in clusters, for jobs on this machine, and for the records that deleted jobs
left in their checkpoint folders.
"""

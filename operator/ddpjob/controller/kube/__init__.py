"""A small controller-runtime: requests, caches, a work queue and leader election. It knows no
DDPJob.
"""

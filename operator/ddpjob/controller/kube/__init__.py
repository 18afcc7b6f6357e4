"""A small controller-runtime: requests, caches, a work queue, leader election; nothing about
DDPJobs.
"""

"""A small controller-runtime without DDPJobs: requests, caches, work queue, leader election."""

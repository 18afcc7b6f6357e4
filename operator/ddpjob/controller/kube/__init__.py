"""A small controller-runtime without DDPJobs: requests, caches, a work queue and leader election."""

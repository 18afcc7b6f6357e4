"""Controller parts independent of DDPJobs: requests, caches, work queue and leader election."""

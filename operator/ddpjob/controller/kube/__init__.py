"""Parts of a controller that are independent of DDPJobs: requests, caches, queue and election."""

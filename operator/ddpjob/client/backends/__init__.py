"""The places of jobs: clusters, this machine, and the checkpoint folders of deleted jobs."""

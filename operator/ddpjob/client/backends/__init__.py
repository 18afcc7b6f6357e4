"""Where jobs are: a cluster, this machine, and the checkpoint folders of jobs that are gone."""

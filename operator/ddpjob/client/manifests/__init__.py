"""Checks manifests and scripts, and turns scripts and the jobs of other tools into DDPJobs."""

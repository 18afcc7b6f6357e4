"""Checks manifests, scripts and other tools' jobs, and turns them into DDPJobs."""

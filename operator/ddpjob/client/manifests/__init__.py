"""What users write: manifests, scripts and other tools' jobs, checked and turned into DDPJobs."""

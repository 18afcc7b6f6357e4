"""User-facing texts that describe jobs and machines, and suggest what to do."""

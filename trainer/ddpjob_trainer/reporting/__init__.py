"""A run's reports: terminal, metrics.jsonl, coordinator, ledger, profiles and sinks."""

"""A run's reports: terminal, metrics.jsonl, the coordinator, the ledger, profiles and sinks."""

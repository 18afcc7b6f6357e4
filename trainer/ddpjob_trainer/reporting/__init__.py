"""What a run reports: terminal, metrics.jsonl, the coordinator, the ledger, profiles and sinks."""

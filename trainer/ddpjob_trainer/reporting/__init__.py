"""The outputs of a run: terminal, metrics.jsonl, coordinator, ledger, profiles and sinks."""

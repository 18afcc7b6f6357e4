"""The outputs of a run: the terminal, metrics.jsonl, coordinator, ledger, profiles and sinks."""

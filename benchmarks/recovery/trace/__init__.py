"""Compares systems under one trace of failures: what they repeat, how long they stand still, what is left."""

"""Measures how fast the trainer feeds a model, and what its bookkeeping costs."""

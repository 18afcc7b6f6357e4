"""Measures how fast the trainer feeds a model, and the cost of its bookkeeping."""

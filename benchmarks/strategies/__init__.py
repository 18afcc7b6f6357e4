"""Compares the same training with every strategy."""

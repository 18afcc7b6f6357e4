"""Compares the same training under every strategy."""

"""Modules for fencing a rank, for stopping it on a signal, and for its exit."""

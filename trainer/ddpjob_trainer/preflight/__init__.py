"""Checks before training whether these machines can train together.

Preflight prints a table with each culprit and the remedy, before any work can be lost. facts.py and
addresses.py collect a rank's own observations, and peers.py collects measurements between ranks.
checks.py judges these findings. conduct.py runs the steps, exchange.py exchanges notes between
ranks, and results.py prints the results.
"""

"""Preflight: can these machines train together?

It prints one table, with each culprit and the remedy, before any work can be lost. facts.py and
addresses.py observe what one rank sees by itself, peers.py what ranks measure with each other;
checks.py judges, conduct.py runs the steps over the notes of exchange.py, and results.py prints.
"""

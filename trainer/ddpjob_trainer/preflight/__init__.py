"""Preflight: can these machines train together? One table before anything is lost, with each culprit and the remedy.

facts.py and addresses.py observe what one rank sees by itself, peers.py what ranks measure with each other;
checks.py judges, conduct.py leads through it over the notes of exchange.py, and results.py prints.
"""

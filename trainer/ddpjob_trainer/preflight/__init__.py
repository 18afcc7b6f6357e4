"""Preflight: can these machines train together?

It prints a table with each culprit and the remedy, before any work can be lost. facts.py and
addresses.py collect what a rank observes by itself, and peers.py what ranks measure with each
other. checks.py judges, conduct.py runs the steps through exchange.py's notes, and results.py
prints.
"""

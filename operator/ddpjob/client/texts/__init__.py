"""Texts for users that describe jobs and machines, and say what to do."""

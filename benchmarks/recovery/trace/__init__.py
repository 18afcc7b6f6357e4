"""Compares systems under the same trace of failures: repeated steps, standstills and useful
steps.
"""

"""Measures how long training is interrupted when something dies."""

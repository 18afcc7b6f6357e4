"""Puts this folder on the import path, for what several kinds of tests share (corpus)."""

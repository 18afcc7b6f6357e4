"""Evaluation on a test set: sums over ranks, precision-recall curves, result files and plots."""

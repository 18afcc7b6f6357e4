"""Evaluation of a model on a test set: sums over ranks, precision-recall curves, files and plots of them."""

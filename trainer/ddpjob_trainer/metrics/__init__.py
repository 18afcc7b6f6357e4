"""Metrics of an evaluation: sums over ranks (tally), precision-recall curves (curves), files and pictures of them."""

"""Networks, their partition into stages, and batch normalization for any number of ranks.

Micro-batch statistics and results do not depend on the number of ranks.
"""

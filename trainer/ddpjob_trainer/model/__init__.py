"""Networks, their partition into stages, and batch normalization for any number of ranks.

Neither micro-batch statistics nor results depend on how many ranks there are.
"""

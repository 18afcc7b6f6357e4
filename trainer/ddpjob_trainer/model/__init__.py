"""Networks, their partition into stages, and batch normalization that does not depend on the number of ranks."""

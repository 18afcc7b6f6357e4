"""Plants hangs of many kinds in real groups, to see whether each is found, named and ended."""

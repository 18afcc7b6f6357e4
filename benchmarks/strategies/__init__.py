"""The same training under every strategy."""

"""Random kills that must leave no trace in a training's result."""

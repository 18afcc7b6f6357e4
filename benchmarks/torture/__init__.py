"""Random kills that must leave no trace in the result of a training run."""

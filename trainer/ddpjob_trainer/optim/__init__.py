"""Loss, optimizers, number formats, the moving average of weights, and non-finite steps."""

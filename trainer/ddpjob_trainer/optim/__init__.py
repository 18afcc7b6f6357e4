"""Loss, optimizers, number formats, the weights' moving average, and non-finite steps."""

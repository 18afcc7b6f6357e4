"""Loss, optimizers, number formats, the moving average of weights, and steps that are not finite."""

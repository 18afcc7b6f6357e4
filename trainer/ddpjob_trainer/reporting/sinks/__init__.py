"""Further destinations for numbers: TensorBoard, Prometheus, Weights & Biases, MLflow.

There is one file for each, and a line in `background`. Numbers also go to metrics.jsonl and the
terminal.
"""

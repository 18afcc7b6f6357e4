"""Additional destinations for metrics: TensorBoard, Prometheus, Weights & Biases and MLflow.

Each destination has a file here and a line in `background`. Metrics always go to metrics.jsonl and
the terminal.
"""

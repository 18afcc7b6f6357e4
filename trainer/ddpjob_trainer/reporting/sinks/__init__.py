"""Additional destinations for metrics: TensorBoard, Prometheus, Weights & Biases and MLflow.

Each destination has a file in this folder and an entry in `background`. Metrics always go to
metrics.jsonl and the terminal, too.
"""

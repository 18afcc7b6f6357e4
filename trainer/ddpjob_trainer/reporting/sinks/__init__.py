"""More destinations for numbers: TensorBoard, Prometheus, Weights & Biases, MLflow.

Each has a file here and a line in `background`. Numbers also go to metrics.jsonl and the terminal.
"""

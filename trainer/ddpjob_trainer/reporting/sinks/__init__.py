"""Where numbers go beside metrics.jsonl and the terminal: TensorBoard, Prometheus, Weights & Biases, MLflow.

One file each, and a line in `background`.
"""

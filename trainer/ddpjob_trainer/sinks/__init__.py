"""Where numbers go beside metrics.jsonl and the terminal: TensorBoard, Prometheus, Weights & Biases, MLflow. One file each."""

from ddpjob_trainer.sinks.base import ReportConfig, Run, Sink, Sinks, open_sinks

__all__ = ["ReportConfig", "Run", "Sink", "Sinks", "open_sinks"]

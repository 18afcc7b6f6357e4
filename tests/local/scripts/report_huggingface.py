"""Hugging Face's Trainer with DDPJob's callback."""

import argparse

import ddpjob_report
import report_ledger
import torch
from ddpjob_report.huggingface import DDPJobCallback, last_checkpoint
from transformers import Trainer, TrainerCallback, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)


class Line(torch.nn.Module):
    """A model that fits y = 3x."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        return {"loss": (logits - labels).square().mean(), "logits": logits}


class Ledger(TrainerCallback):
    """Records each step."""

    def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
        report_ledger.made(state.global_step - 1)


def main() -> None:
    """Train a line."""
    steps, folder = parser.parse_args().steps, ddpjob_report.checkpoint_dir()
    data = [{"x": torch.tensor([i / 512]), "labels": torch.tensor([3 * i / 512])} for i in range(512)]
    settings = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=4, save_steps=20, save_total_limit=2,
        logging_steps=5, report_to="none", use_cpu=True, ddp_backend="gloo", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=Line(), args=settings, train_dataset=data, callbacks=[Ledger(), DDPJobCallback()])
    trainer.train(resume_from_checkpoint=last_checkpoint(folder))
    print(f"ends at step {trainer.state.global_step}", flush=True)


if __name__ == "__main__":
    main()

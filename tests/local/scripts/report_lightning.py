"""Lightning with DDPJob's callback."""

import argparse
import os

import ddpjob_report
import report_ledger
import torch
from ddpjob_report.lightning import DDPJobCallback, last_checkpoint
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)


class Line(LightningModule):
    """A model that fits y = 3x and records each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        report_ledger.made(self.global_step)
        loss = (self.layer(batch) - 3 * batch).square().mean()
        self.log("spread", loss.detach().sqrt())
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        """Measure nothing. The test only checks that this runs."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    """Train a line."""
    steps, folder = parser.parse_args().steps, ddpjob_report.checkpoint_dir()
    loader = torch.utils.data.DataLoader(torch.linspace(-1, 1, 64).unsqueeze(1), batch_size=1)
    trainer = Trainer(
        accelerator="cpu", strategy="ddp", num_nodes=int(os.environ["GROUP_WORLD_SIZE"]), devices=1, max_steps=steps,
        max_epochs=2, log_every_n_steps=5, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ModelCheckpoint(dirpath=folder, every_n_train_steps=20), DDPJobCallback()],
    )  # fmt: skip
    trainer.validate(Line(), loader, verbose=False)  # before any training, as many scripts do
    trainer.fit(Line(), loader, ckpt_path=last_checkpoint(folder))
    print(f"ends at step {trainer.global_step}", flush=True)


if __name__ == "__main__":
    main()

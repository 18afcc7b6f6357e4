"""Accelerate with DDPJob's tracker and checkpoints."""

import argparse

import ddpjob_report
import report_ledger
import torch
from accelerate import Accelerator
from ddpjob_report.accelerate import DDPJobTracker, resume, save, take

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)


def main() -> None:
    """Train a line."""
    steps = parser.parse_args().steps
    accelerator = Accelerator(cpu=True, log_with=DDPJobTracker())
    accelerator.init_trackers("line")
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    first = resume(accelerator)
    for step in range(first, steps):
        report_ledger.made(step)
        x = torch.full((4, 1), step / steps)
        loss = (model(x) - 3 * x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        take(accelerator, step + 1)
        accelerator.log({"loss": loss, "steps": steps, "mode": "a string is not a number"}, step=step + 1)
        stop = ddpjob_report.should_stop()
        if stop or (step + 1) % 20 == 0:
            save(accelerator, step + 1)
        if stop:
            ddpjob_report.saved_and_leave()
    accelerator.end_training()
    print(f"ends at step {steps}", flush=True)


if __name__ == "__main__":
    main()

"""A script with its own loop that reports, saves when its pod is asked to stop, and resumes."""

import argparse
import time

import ddpjob_report
import report_ledger
import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--loaders", type=int, default=0)


class Numbers(torch.utils.data.Dataset):
    """A data set whose i-th sample is the number i."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> float:
        return float(index)


def main() -> None:
    """Train a number."""
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, folder = dist.get_rank(), ddpjob_report.checkpoint_dir()
    saved = folder / "step"
    begin = torch.tensor([int(saved.read_text()) if saved.exists() else 0])
    dist.broadcast(begin, 0)
    print(f"rank {rank} begins at step {begin.item()}", flush=True)
    batches = iter(torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=args.loaders))
    for step in range(int(begin), args.steps):
        report_ledger.made(step)
        dist.all_reduce(next(batches))
        ddpjob_report.report(
            epoch=1, epochs=1, step=step + 1, steps=args.steps, loss=torch.tensor(1 / (step + 1)), accuracy=0.5
        )
        if ddpjob_report.should_stop():
            if rank == 0:
                time.sleep(0.5)  # the other ranks must not end the round before this
                (folder / "new").write_text(str(step + 1))
                (folder / "new").rename(saved)
            ddpjob_report.saved_and_leave()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

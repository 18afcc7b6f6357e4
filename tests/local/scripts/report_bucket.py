"""A script with its own loop whose only persistent storage is a bucket. Its state depends on every
earlier step.
"""

import argparse
import json
import time

import ddpjob_report
import report_ledger
import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--seconds", type=float, default=0.05)


def main() -> None:
    """Train a number that depends on every earlier step."""
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, folder = dist.get_rank(), ddpjob_report.checkpoint_dir()
    newest = ddpjob_report.restore_checkpoint()
    state = json.loads(newest.read_text()) if newest else {"step": 0, "value": 1}
    print(f"rank {rank} begins at step {state['step']} with {state['value']}", flush=True)
    for step in range(state["step"], args.steps):
        report_ledger.made(step)
        number = torch.tensor([state["value"] * (rank + 3) % 1009])
        dist.all_reduce(number)
        state = {"step": step + 1, "value": int(number) % 1009}
        time.sleep(args.seconds)
        ddpjob_report.report(epoch=1, epochs=1, step=step + 1, steps=args.steps, loss=1 / (step + 1))
        if rank == 0 and (step + 1) % 5 == 0:
            (folder / "new").write_text(json.dumps(state))
            (folder / "new").rename(folder / "state.json")
            ddpjob_report.copy_checkpoint(folder / "state.json", step + 1, keep=2)
    print(f"rank {rank} ends with {state['value']}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

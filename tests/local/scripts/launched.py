"""The script that each launcher starts. It prints the number of ranks and the sum of one per rank.

With `--until FILE`, ranks of a torch process group repeat the sum until the file exists.
"""

import atexit
import os
import sys
import time

import torch
import torch.distributed as dist


def say(rank: int, world: int, total: float) -> None:
    """Print one line."""
    sys.stdout.write(f"rank {rank} of {world}: {total:.0f}\n")  # a single write, because ranks share the output
    sys.stdout.flush()


def in_group(rank: int, world: int) -> None:
    """Sum over the group."""
    total = torch.ones(1)
    dist.all_reduce(total)
    say(rank, world, total.item())
    if "--until" in sys.argv:
        enough = sys.argv[sys.argv.index("--until") + 1]
        while total.item():
            time.sleep(0.1)
            total.fill_(not os.path.exists(enough))  # noqa: PTH110
            dist.all_reduce(total)


def spawned(_: int, node: int) -> None:
    """Join the group by its address, as the only rank of a node."""
    address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    dist.init_process_group("gloo", init_method=address, rank=node, world_size=2)
    in_group(node, 2)


def main() -> None:
    """Choose the kind of group from the arguments."""
    index = int(os.environ["DDPJOB_INDEX"])
    if "--spawn" in sys.argv:
        torch.multiprocessing.spawn(spawned, (index,), nprocs=1)
    elif "--rpc" in sys.argv:
        import torch.distributed.rpc as rpc

        rpc.init_rpc(f"rank{index}", rank=index, world_size=2)
        say(index, 2, rpc.rpc_sync(f"rank{1 - index}", torch.add, (torch.ones(1), 1)).item())
        rpc.shutdown()
    elif "--accelerate" in sys.argv:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        say(accelerator.process_index, accelerator.num_processes, accelerator.reduce(torch.ones(1)).item())
    else:
        dist.init_process_group("gloo")
        in_group(dist.get_rank(), dist.get_world_size())
        if "--fail" in sys.argv:
            if dist.get_rank() == 1:
                if "--stay" in sys.argv:
                    atexit.register(time.sleep, 100_000)
                raise ValueError("made to fail")
            dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    main()

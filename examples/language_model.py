"""Trains a small language model, or fine-tunes one (--base CHECKPOINT), exactly on any number of ranks.

The text is generated: statements for training, questions for fine-tuning. Dropout is drawn per
micro-batch, not per rank, and each step has four micro-batches on any number of ranks.
"""

import argparse
import itertools
import random
from contextlib import nullcontext

import ddpjob_report
import torch
import torch.distributed as dist
from ddpjob_trainer import api
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LENGTH, BATCH, MICRO_BATCHES = 32, 32, 4
NOUNS, VERBS = ("cat", "dog", "fox", "owl", "hen", "rat"), ("sees", "hears", "likes", "meets", "follows")

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--base", metavar="CHECKPOINT", help="fine-tune these weights on questions")
parser.add_argument("--lr", type=float, default=3e-3)
arguments = parser.parse_args()


def text(form):
    """Return each sentence of `form` once, always in the same order."""
    sentences = [form.format(*words) for words in itertools.product(NOUNS, VERBS, NOUNS)]
    random.Random(0).shuffle(sentences)
    return torch.tensor([ord(letter) for letter in "".join(sentences)])


class LanguageModel(nn.Module):
    """A causal transformer over ASCII letters: (n, length) -> next-letter scores (n, length, 128)."""

    def __init__(self, width=32):
        super().__init__()
        self.letters, self.places = nn.Embedding(128, width), nn.Parameter(torch.zeros(LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, 2, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 128)
        self.register_buffer("future", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, letters):
        """Let each position see only itself and earlier positions."""
        return self.head(self.layers(self.letters(letters) + self.places, self.future, is_causal=True))


def loss_sum(scores, windows):
    """Return the sum of the windows' losses, each the mean over its letters."""
    losses = nn.functional.cross_entropy(scores.transpose(1, 2), windows[:, 1:], reduction="none")
    return losses.mean(1).sum()


windows = text("does the {} see that it {} the {}? yes. " if arguments.base else "the {} {} the {}. ")
windows = windows[: len(windows) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
test_size = len(windows) // 5
train, test = windows[test_size:], windows[:test_size]

dist.init_process_group("gloo")
group = api.Group.from_env()
torch.manual_seed(0)
model = LanguageModel()
if arguments.base:
    model.load_state_dict(torch.load(arguments.base, map_location="cpu", weights_only=True)["model"])
network = DistributedDataParallel(model)
# eps exceeds the rounding errors of gradients that should be 0. With a smaller eps, AdamW would turn
# these errors into full steps.
optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, eps=1e-5)
sampler = api.ElasticSampler(len(train), BATCH, api.Dealing(group.rank, group.world, MICRO_BATCHES))
step, stopped = 0, False


def state():
    """Return everything that the next step depends on."""
    parts = {"model": model, "optimizer": optimizer, "sampler": sampler}
    return {"step": step, **{name: part.state_dict() for name, part in parts.items()}}


with api.CheckpointFolder.open(group, every_steps=5) as checkpoints:
    if (saved := checkpoints.newest()) is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        sampler.load_state_dict(saved["sampler"])
        step = saved["step"]
    stop = api.StopRequest(group, checkpoints)
    stop.listen()
    ledger = api.Ledger(checkpoints.path / "run", group, checkpoints.incarnation)
    ledger.start(step, len(train), arguments.epochs)
    for taken in sampler.upcoming(arguments.epochs):
        step += 1
        ledger.step(step, taken)
        agreement = stop.agreement(checkpoints.due(step))
        for micro in taken.micros:  # Gradients are exchanged with the last micro-batch.
            with nullcontext() if micro is taken.micros[-1] else network.no_sync():
                api.seed_torch(micro.key, torch.device("cpu"))
                losses = loss_sum(network(train[micro.samples, :-1]), train[micro.samples]) * micro.counts
                (losses * group.world / len(taken.samples)).backward()
        optimizer.step()
        optimizer.zero_grad()
        sampler.done(taken)
        if sampler.epoch_is_done:
            sampler.next_epoch()
        stopped, save = agreement.wait()
        if stopped or save:
            checkpoints.save(state, step)
        for done in checkpoints.completed():
            ledger.checkpoint(done.step)
        if stopped:
            break
    stop.over()
    checkpoints.save(state, step)
    checkpoints.finish()
    if not stopped:
        ledger.end(step)
        checkpoints.release()

model.eval()
mine = api.share(test, group.rank, group.world)
with torch.no_grad():
    total = group.sum(loss_sum(model(mine[:, :-1]), mine).double())
if group.rank == 0:
    print(f"{step} steps, test loss per letter {total / len(test):.4f}", flush=True)
dist.destroy_process_group()
if stopped:
    ddpjob_report.saved_and_leave()

"""The training: one loop over steps that any number of ranks share, evaluation, checkpoints, and an orderly end at SIGTERM."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import torch

from ddpjob_trainer import devices, fast_start, mixing
from ddpjob_trainer.checkpoints import CheckpointFolder, Snapshot, fit, prepare_folder
from ddpjob_trainer.config import Config
from ddpjob_trainer.data import Batch, DataSet, open_data
from ddpjob_trainer.data.corrupt import CorruptCount
from ddpjob_trainer.errors import CheckpointError, ConfigError, DataError, TrainingError
from ddpjob_trainer.evaluate import evaluate
from ddpjob_trainer.fence import Claim, place_from_env
from ddpjob_trainer.group import Group, joined, wanted_world
from ddpjob_trainer.guard import NonFiniteGuard
from ddpjob_trainer.ledger import Ledger
from ddpjob_trainer.models import build_model, is_tied_to_micro_batches
from ddpjob_trainer.optim import learning_rate
from ddpjob_trainer.profiling import Profile
from ddpjob_trainer.progress import Plan, Progress
from ddpjob_trainer.sampler import Dealing, ElasticSampler, Micro, SamplerState, Step, steps_per_epoch
from ddpjob_trainer.signals import EXIT_STEPPED_ASIDE, Due, StopRequest
from ddpjob_trainer.stacks import StackDumps
from ddpjob_trainer.strategies import devices_per_rank, enter, open_strategy


def run(config: Config) -> int:
    """Train as configured, from the newest checkpoint if there is one. Returns the exit code: 0 done, 75 stopped by SIGTERM.

    Raises TrainerError (its message is for the user) before training for bad input, RuntimeError when a peer is gone.
    """
    if not config.model.compile:
        fast_start.install()
    enter(config)
    group = Group.from_env()
    if config.preflight.run:
        from ddpjob_trainer.preflight.flight import require

        require(config, group)
    placement = devices.choose(config.train.backend, group.local_rank * devices_per_rank(config))
    devices.limit_threads(config.train.threads, group.local_world)
    data = open_data(config.data, placement.device)
    checkpoints = CheckpointFolder(config.checkpoint, config.checkpoint_dir, group)
    if checkpoints.writes or config.train.ledger:
        prepare_folder(config.run_dir, "train.run_dir")
    with joined(group, placement, config.train.timeout_seconds), checkpoints:
        check_same_data(group, data, config)
        trainer = Trainer(config, group, placement.device, data, checkpoints)
        with closing(trainer.stacks), closing(trainer.progress):
            trainer.resume()
            return trainer.train()


def agree_on_life(group: Group) -> Claim:
    """One identity for this life of the job: the highest generation and round among its ranks, and a random number by rank 0."""
    generation, round_ = place_from_env()
    generations, rounds = group.gather(generation), group.gather(round_)
    return Claim(*max(zip(generations, rounds, strict=True)), group.gather(random.SystemRandom().getrandbits(62))[0])


def check_same_data(group: Group, data: DataSet, config: Config) -> None:
    """Raises DataError on all ranks when they see different data: sample numbers would mean other images on some of them."""
    seen = list(zip(*(group.gather(size) for size in (data.train_size, data.test_size, data.classes)), strict=True))
    if len(set(seen)) > 1:
        first = {sizes: seen.index(sizes) for sizes in seen}
        which = "; ".join(
            f"rank {rank}{' and others' if seen.count(sizes) > 1 else ''}: {sizes[0]} training images, {sizes[1]} test images,"
            f" {sizes[2]} classes"
            for sizes, rank in first.items()
        )
        where = config.data.url or config.data.dir or config.data.name.value
        raise DataError(f"the ranks see different data in {where} ({which}): make data.dir the same on all nodes")


class Trainer:
    """The state of a run on one rank, and the loop."""

    def __init__(self, config: Config, group: Group, device: torch.device, data: DataSet, checkpoints: CheckpointFolder) -> None:
        self.config, self.group, self.device, self.data, self.checkpoints = config, group, device, data, checkpoints
        claim = agree_on_life(group)
        checkpoints.claim(claim)
        self.strategy = open_strategy(config, group, device)
        model = build_model(config.model, data.shape, data.classes, config.data.seed, device)
        tied = is_tied_to_micro_batches(model)
        self.strategy.shape = data.shape
        self.strategy.prepare(model)
        self.micro_batches = self._micro_batches(tied or config.ddp.ordered or mixing.wanted(config.data))
        self.corrupt = CorruptCount(data.train_size, config.data)
        self.sampler = ElasticSampler(data.train_size, config.data.batch, self._dealing(), SamplerState(seed=config.data.seed))
        self.step, self.epochs_evaluated = 0, 0
        self.steps_per_epoch = steps_per_epoch(data.train_size, config.data.batch)
        self.total_steps = self.steps_per_epoch * config.train.epochs
        self.stop = StopRequest(group, checkpoints)
        self.ledger = Ledger(config.run_dir, config.train.ledger, group, claim)
        plan = Plan(config.train.epochs, self.total_steps, data.train_size, claim.round)
        names = getattr(data, "class_names", None)
        self.progress = Progress(plan, config, group, writes=checkpoints.writes, class_names=names)
        dynamic = bool(self.strategy.precision.state())  # nothing else has a state
        self.guard = NonFiniteGuard(config.train.nonfinite_limit, group, self.progress.skipped, dynamic_scale=dynamic)
        self.profile = Profile(config.report.profile_steps, config.run_dir, group.rank)
        self.stacks = StackDumps(config.run_dir, group.rank, config.train.timeout_seconds)

    def _micro_batches(self, tied: bool) -> int:
        """How many a global batch has at a first start; 0: samples are dealt out."""
        parts = self.strategy.place.parts * max(self.group.world, wanted_world()) // self.group.world
        return self.config.data.micro_batches or (parts * self.strategy.portions if tied else 0)

    def _dealing(self) -> Dealing:
        place, strategy = self.strategy.place, self.strategy
        return Dealing(place.part, place.parts, self.micro_batches, strategy.portions, strategy.equal)

    # ------------------------------------------------------------ the loop

    def train(self) -> int:
        """All epochs that are left. Returns the exit code."""
        began = time.monotonic()
        self.stop.listen()
        self.ledger.start(self.step, self.data.train_size, self.config.train.epochs)
        self.progress.start(self.step, self.sampler.state.epoch + 1, self._onlookers())
        stopped = self._evaluate_if_due()
        while not stopped and self.sampler.state.epoch < self.config.train.epochs:
            stopped = self._train_epoch()
        self.stop.over()
        self._save()  # Unless this very state is saved already.
        self.checkpoints.finish()
        self._tell_of_checkpoints()
        if stopped:
            self.progress.stopped(self.step)
        else:
            self.ledger.end(self.step)
            self.progress.end(self.step, time.monotonic() - began)
        self.progress.close()
        self.profile.close()
        self.strategy.close()
        self.group.barrier()  # Nobody leaves before rank 0 has saved: torchrun ends the others when one leaves.
        return EXIT_STEPPED_ASIDE if stopped else 0

    def _train_epoch(self) -> bool:
        """The rest of the sampler's epoch, a checkpoint, an evaluation. Returns whether all ranks agreed to stop."""
        self.progress.restart_clock()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        samples: int | torch.Tensor = 0
        steps = list(self.sampler.rest_of_epoch())
        batches = self._batches([micro for step in steps for micro in step.micros], self.sampler.state.epoch)
        self.corrupt.begin_epoch()
        for step in steps:
            self.stacks.alive()
            self.profile.before(self.step + 1)
            agreement = self.stop.agreement(self._save_due(step))
            losses, counted = self._optimize(step, batches)
            loss_sum, samples = loss_sum + losses, samples + counted
            self.sampler.done(step)
            self.step += 1
            if self.step % self.config.train.log_every == 0 or self.sampler.epoch_is_done:
                self._report(loss_sum, samples)
                loss_sum, samples = torch.zeros((), dtype=torch.float64, device=self.device), 0
            stop, save = agreement.wait()
            if self.sampler.epoch_is_done:
                self.sampler.next_epoch()
            if stop or save:
                self._save()
            self._tell_of_checkpoints()
            if stop:
                return True
        return self._evaluate_if_due()

    def _optimize(self, step: Step, batches: Iterator[Batch]) -> tuple[torch.Tensor, int | torch.Tensor]:
        """One optimizer step; returns this rank's sum of losses, and the samples that count of the global batch, or zeros if left out."""
        rate = learning_rate(self.config.optim, self.step, self.steps_per_epoch, self.total_steps)
        self.ledger.step(self.step + 1, step if self.strategy.place.counts else replace(step, micros=[]))
        count = len(step.samples)
        losses = self.strategy.backward(step.micros, batches, count)
        if unreadable := self.corrupt.add(self.group):
            self.strategy.scale_gradients(count / max(1, count - unreadable))
        self.update = self.strategy.update(rate)
        return self.guard.took(self.step + 1, step.mine, losses, count - unreadable, self.update)

    def _batches(self, micros: list[Micro], epoch: int) -> Iterator[Batch]:
        """The micro-batches on the device, and how long each was waited for."""
        loaded = self.data.train_batches((micro.samples for micro in micros), epoch)
        for micro in micros:
            waiting = time.perf_counter()
            batch = next(loaded).to(self.device)
            self.progress.waited(time.perf_counter() - waiting)
            if micro.counts and self.strategy.place.counts:
                self.corrupt.met(batch.unreadable)
            yield mixing.mix(self.config.data, batch, micro.key, self.data.classes)

    # ------------------------------------------------------------ what surrounds it

    def _report(self, loss_sum: torch.Tensor, counted: int | torch.Tensor) -> None:
        self.guard.look()
        own, samples = loss_sum.cpu().reshape(1) * self.strategy.place.counts, int(counted)
        mean = self.group.sum(own).item() / samples if samples else math.nan
        state = self.sampler.state
        if samples and not math.isfinite(mean):
            raise TrainingError(
                f"the loss is {mean} at step {self.step} (epoch {state.epoch + 1}): lower optim.lr or lengthen optim.warmup_epochs;"
                f" checkpoints in {self.checkpoints.path} are from before"
            )
        left = (self.config.train.epochs - state.epoch) * self.data.train_size - state.consumed
        rate = self.strategy.optimizer.param_groups[0]["lr"]
        self.progress.report(
            epoch=state.epoch + 1,
            step=self.step,
            loss=mean,
            learning_rate=rate,
            samples=samples,
            samples_left=left,
            gradient_norm=float(self.update.norm),
            skipped_steps=self.guard.skipped,
            corrupt_images=self.corrupt.epoch,
        )

    def _evaluate_if_due(self) -> bool:
        """Evaluate the last epoch that is complete, unless it is done or not due. Returns whether all ranks agreed to stop."""
        complete = self.sampler.state.epoch
        due = complete % self.config.train.eval_every == 0 or complete == self.config.train.epochs
        if complete == 0 or complete <= self.epochs_evaluated or not due:
            return False
        strategy = self.strategy
        strategy.train_mode(False)
        batch, device, settings, alive = self.config.train.eval_batch, self.device, self.config.eval, self.stacks.alive
        result = evaluate(strategy.logits, strategy.place, self.data, batch, device, self.group, self.stop, config=settings, alive=alive)
        strategy.train_mode(True)
        if result is None:
            return True
        self.epochs_evaluated = complete
        self.progress.evaluated(complete, self.step, result)
        self.checkpoints.scored(self.step, {"accuracy": result.accuracy, "loss": result.loss})
        return False

    def _save_due(self, step: Step) -> Due:
        complete = step.after.epoch + 1 if step.after.consumed >= self.data.train_size else None
        return self.checkpoints.due(self.step + 1, epoch=complete, last=complete == self.config.train.epochs)

    def _save(self) -> None:
        """A checkpoint of the state after the last step, written while training goes on."""
        self.checkpoints.save(self._snapshot, self.step)

    def _tell_of_checkpoints(self) -> None:
        for landed in self.checkpoints.landed():
            self.ledger.checkpoint(landed.step)
            self.progress.checkpoint(landed.step, landed.write_seconds)

    def _snapshot(self) -> Snapshot:
        return {
            "step": self.step,
            "sampler": self.sampler.state_dict(),
            "epochs_evaluated": self.epochs_evaluated,
            "schedule": {"steps_per_epoch": self.steps_per_epoch, "total_steps": self.total_steps},
            "micro_batches": self.micro_batches,
            **self.strategy.state(),
            "config": self.config.flat(),
        }

    def resume(self) -> None:
        """Go on from the newest whole checkpoint that any rank holds, if there is one. Raises CheckpointError when it does not fit."""
        snapshot = self.checkpoints.newest()
        if snapshot is None:
            self._check_that_ranks_have_work()
            self._load_weights()
            return
        fit.check_resume(snapshot, self.strategy.state()["model"], self.config.flat(), self.checkpoints.path)
        try:
            self.strategy.load(snapshot)
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"the checkpoint of step {snapshot['step']} in {self.checkpoints.path} does not fit this optimizer or precision ({error});"
                f" give the configuration that it was made with, or another checkpoint.dir to train anew"
            ) from error
        self.sampler.load_state_dict(snapshot["sampler"])
        self.step, self.epochs_evaluated = int(snapshot["step"]), int(snapshot["epochs_evaluated"])
        if not self.config.data.micro_batches and not self.config.model.sync_batchnorm:
            self.micro_batches = int(snapshot["micro_batches"]) or self.micro_batches
        self.sampler.dealing = self._dealing()

    def _load_weights(self) -> None:
        """checkpoint.load: start from the weights of a file."""
        if (path := self.config.checkpoint.load) is not None:
            state = self.strategy.state()
            weights = fit.load_weights(path, self.config.checkpoint.load_except, state["model"], self.group)
            self.strategy.load({**state, "model": weights})

    def _onlookers(self) -> int:
        """Parts of the group that a full global batch leaves without a micro-batch that counts."""
        busy = min(self.micro_batches or self.config.data.batch, self.config.data.batch)
        return max(0, self.strategy.place.parts - busy)

    def _check_that_ranks_have_work(self) -> None:
        """Raises ConfigError at a first start. Later ranks may come that have to look on; they take part with weight zero."""
        parts, batch, micro_batches = self.strategy.place.parts, self.config.data.batch, self.micro_batches
        if parts > batch:
            raise ConfigError(
                f"data.batch={batch} cannot be shared out over {parts} ranks: each needs a sample at least;"
                f" set data.batch to {parts} or more, or start {batch} ranks"
            )
        if 0 < micro_batches < parts or micro_batches > batch:
            raise ConfigError(
                f"data.micro_batches={micro_batches} does not fit {parts} ranks and data.batch={batch}:"
                f" set it to {parts} or a multiple of it, and to {batch} at most"
            )

"""The user's callbacks (`train.callbacks`): metrics, early stopping, and other code between steps.

A callback is an object that `package.module:name()` returns, with any of these methods. All ranks
call them in the same order.

    on_train_begin(model)             before the first step
    on_step(step, loss)               every train.log_every steps, with their mean loss on all ranks
    on_test_batch(scores, targets)    for each part of the test set that this rank evaluates;
                                      returns sums, which are added up over all parts and ranks
    on_test_end(sums)                 with these sums, (n,) float64; returns {name: value} to report
    on_epoch_end(epoch, metrics)      after each evaluation; if it returns True on any rank,
                                      training ends on all of them
    state_dict(), load_state_dict(s)  the state that checkpoints keep, from rank 0

A checkpoint at the end of an epoch holds the state before the evaluation, so a restart repeats the
evaluation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from ddpjob_runtime.protocol import MAX_FIGURES

from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import ConfigError, TrainingError
from ddpjob_trainer.evaluation.accumulate import Adding, Evaluation
from ddpjob_trainer.own_functions import explain, load_function

_KEY = "train.callbacks"
_MOST_METRICS = 20
_ALL_METRICS = 60
"""Maximum number of metrics in one evaluation. More metrics would make a job's report too long."""
_OTHER_FIGURES = {
    "self", "event", "time", "round", "epoch", "step", "unreadable", "testLoss", "learningRate", "dataWait",
    "gradientNorm", "mfu", "skippedSteps", "corruptImages", "checkpointTime", "copyStep", "copyTime", "copyBehind",
}  # fmt: skip
"""Names that a metric cannot have because they already have a meaning in metrics.jsonl or in the
job's reports.
"""
_OF_EVALUATIONS = ("on_test_batch", "on_test_end", "on_epoch_end")
_METHODS = ("on_train_begin", "on_step", *_OF_EVALUATIONS)


class Callbacks:
    """The user's callbacks by name, in the order of the configuration."""

    def __init__(self, names: Sequence[str]) -> None:
        """Create the callbacks. Raises ConfigError, with the remedy, for an invalid callback."""
        self._own: dict[str, Any] = {}
        for name in names:
            if ":" not in name or name in self._own:
                raise ConfigError(f"{_KEY}: {name!r}: must be package.module:name, and may be listed only once")
            make = load_function(_KEY, name)
            with explain(_KEY, name, "calling it without arguments"):
                self._own[name] = make()
            _check_methods(name, self._own[name])

    def check_evaluations(self, every: int) -> None:
        """Raise ConfigError if a callback needs evaluations, but training has none.

        Training has no evaluations if `every` is 0.
        """
        for method in _OF_EVALUATIONS:
            for name in [] if every else self.having(method):
                raise ConfigError(
                    f"{_KEY}={name}: with train.eval_every=0, {method} is never called; set train.eval_every=1, or"
                    " leave out the callback"
                )

    def call(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Call `method` on each callback that has it.

        Return the results, keyed by callback name. Raises TrainingError if a call fails.
        """
        results = {}
        for name, own in self._own.items():
            if (act := getattr(own, method, None)) is not None:
                with explain(_KEY, name, method, TrainingError):
                    results[name] = act(*arguments)
        return results

    def ends(self, epoch: int, metrics: Mapping[str, float], group: Group) -> list[str]:
        """Call `on_epoch_end`, and return the names of the callbacks that end the training.

        A callback ends the training if it returns True on any rank. All ranks must call this
        together.
        """
        results = self.call("on_epoch_end", epoch, dict(metrics))
        if not results:
            return []
        own = []
        for name, result in results.items():
            with explain(_KEY, name, "converting the result of on_epoch_end to bool", TrainingError):
                own.append(float(bool(result)))
        wishes = group.sum(torch.tensor(own))
        return [name for name, wish in zip(results, wishes.tolist(), strict=True) if wish]

    def still_ending(self, ended: list[str]) -> list[str]:
        """Return the callbacks in `ended` that are still configured.

        `ended` contains the callbacks that had ended the training when the checkpoint was saved.
        """
        return [name for name in self._own if name in ended]

    def summing(self, inner: Adding) -> Adding:
        """Return an accumulator that adds the callbacks' metrics to the results of `inner`."""
        return _CallbackSums(self, inner) if self.having("on_test_batch") else inner

    def metrics(self, name: str, sums: torch.Tensor, taken: Collection[str]) -> dict[str, float]:
        """Return the metrics that a callback computes from its sums.

        Raises TrainingError if there are too many metrics, or if the name of a metric is too long,
        is in `taken`, or already has another meaning.
        """
        with explain(_KEY, name, "on_test_end", TrainingError):
            found = {str(key): float(value) for key, value in self._own[name].on_test_end(sums).items()}
        wrong = [key for key in found if key in taken or key in _OTHER_FIGURES or len(key) > MAX_FIGURES]
        if wrong or len(found) > _MOST_METRICS or len(found) + len(taken) > _ALL_METRICS:
            raise TrainingError(
                f"{_KEY}={name}: on_test_end returned {', '.join(wrong or found)[:200]}; return at "
                f"most {_MOST_METRICS} values (and {_ALL_METRICS} from all callbacks), under unused "
                f"names of at most {MAX_FIGURES} characters"
            )
        return found

    def having(self, method: str) -> list[str]:
        """Return the names of the callbacks that have `method`."""
        return [name for name, own in self._own.items() if hasattr(own, method)]

    def state(self) -> dict[str, Any]:
        """Return the callbacks' states, to be kept in a checkpoint."""
        return self.call("state_dict")

    def load(self, states: Mapping[str, Any]) -> list[str]:
        """Give each callback its state from a checkpoint.

        Return notes about callbacks whose state is missing from the checkpoint, and about states
        that are not used.
        """
        kept = self.having("state_dict")
        for name in kept:
            if name in states:
                with explain(_KEY, name, "load_state_dict", TrainingError):
                    self._own[name].load_state_dict(states[name])
        fresh, unused = [name for name in kept if name not in states], [name for name in states if name not in kept]
        return [
            *(
                f"{_KEY}: {name} starts from scratch, because the checkpoint does not contain its state"
                for name in fresh
            ),
            *(f"{_KEY}: the checkpoint's state of {name} is not used" for name in unused),
        ]


def _check_methods(name: str, own: Any) -> None:
    has = [method for method in dir(own) if method.startswith("on_")]
    if not has or not set(has) <= set(_METHODS):
        raise ConfigError(
            f"{_KEY}={name}: {type(own).__name__} has {', '.join(has) or 'no method of a callback'}; the methods are"
            f" {', '.join(_METHODS)}"
        )
    for pair in (("state_dict", "load_state_dict"), ("on_test_batch", "on_test_end")):
        if hasattr(own, pair[0]) != hasattr(own, pair[1]):
            raise ConfigError(f"{_KEY}={name}: {' and '.join(pair)} belong together; add the one that is missing")


def _check_counts(name: str, counts: Collection[int]) -> None:
    if len(counts) > 1:
        raise TrainingError(
            f"{_KEY}={name}: on_test_batch returned {' and '.join(map(str, sorted(counts)))} sums for different parts"
            " of the test set; always return the same number, for example with torch.bincount(..., minlength=classes)"
        )


class _CallbackSums:
    """Adds up the sums that callbacks return, in addition to the sums of an evaluation."""

    def __init__(self, callbacks: Callbacks, inner: Adding) -> None:
        self._callbacks, self._inner = callbacks, inner
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Add the scores and targets of some of this rank's samples."""
        self._inner.add(logits, labels)
        for name, found in self._callbacks.call("on_test_batch", logits.detach().float(), labels).items():
            with explain(_KEY, name, "on_test_batch", TrainingError):
                sums = torch.as_tensor(found).detach().to("cpu", torch.float64).reshape(-1)
            before = self._sums.get(name, torch.zeros_like(sums))
            _check_counts(name, {len(before), len(sums)})
            self._sums[name] = before + sums

    def reduce(self, group: Group, counted: int, unreadable: int = 0) -> Evaluation:
        """Return the evaluation's result over all ranks, with the callbacks' metrics.

        All ranks must call this together.
        """
        result, own = self._inner.reduce(group, counted, unreadable), dict[str, float]()
        for name in self._callbacks.having("on_test_batch"):
            sums = self._sums.get(name)
            # A rank without test samples has no sums, and does not know how many sums other ranks
            # have.
            counts = set(group.gather(-1 if sums is None else len(sums))) - {-1}
            _check_counts(name, counts)
            total = group.sum(torch.zeros(max(counts, default=0), dtype=torch.float64) if sums is None else sums)
            own |= self._callbacks.metrics(name, total, {*result.scalars(), *own})
        return replace(result, own=own)

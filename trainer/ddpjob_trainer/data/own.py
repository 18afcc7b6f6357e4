"""The user's own data set, named by a function: `data.name=package.module:function`.

The user's code may draw random numbers for a sample from Python's, NumPy's and torch's generators,
for example for augmentation. These numbers depend only on (seed, epoch, sample), so they are the
same on any number of ranks and in any worker process.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import suppress
from functools import partial
from itertools import tee
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch.utils.data import TensorDataset

from ddpjob_trainer.config.sections import DataConfig, Flip
from ddpjob_trainer.data.augment import check_shift, is_mirrored, pad
from ddpjob_trainer.data.dataset import IMAGENET_MEAN, IMAGENET_STD, Batch, DataSet, Normalize, Targets, fingerprint
from ddpjob_trainer.data.pool import Pool, Request
from ddpjob_trainer.data.randomness import derive, seed_draws, uniform
from ddpjob_trainer.errors import ConfigError, DataError
from ddpjob_trainer.own_functions import load_function

_LOOKED_AT = 32
"""The fingerprint of a Dataset covers about this many samples of each set. The fingerprint of
tensors covers about a thousand inputs and all targets.
"""
_TENSORS_LOOKED_AT = 1024
_TEST = 0x74657374
_SETS = ("train", "test")

Pair = tuple[torch.Tensor, torch.Tensor]
T = TypeVar("T")


class Samples(NamedTuple):
    """The inputs (n, ...) and targets (n, ...) of some samples."""

    inputs: torch.Tensor
    targets: torch.Tensor


class OwnData(DataSet):
    """The data set returned by the user's function: (train, test) or (train, test, classes).

    A set may be a pair of tensors or numpy arrays, which are kept on the device. It may also be a
    Dataset, which `data.workers` processes read. uint8 images are copied to the device as uint8,
    because float images would take four times as many bytes.
    """

    def __init__(self, config: DataConfig, device: torch.device) -> None:
        """Call the user's function, and check the sets that it returns.

        Raises a ConfigError or DataError that shows the returned value and the remedy.
        """
        if config.randaugment_ops or config.trivialaugment:
            key = "trivialaugment" if config.trivialaugment else "randaugment_ops"
            raise ConfigError(
                f"data.{key} has no effect on data.name={config.name}, which augments its own "
                f"samples; leave out data.{key}"
            )
        self._config, self._device, self._what = config, device, f"data.name={config.name}"
        train, test, names = self._call_function()
        self._sets = (self._checked_set("train", train), self._checked_set("test", test))
        self.train_size, self.test_size = (len(cast(Sized, each)) for each in self._sets)
        first_of_test: Pair
        self._first: Pair
        self._first, first_of_test = (
            self._run_apart(each, partial(self._read_one, name, 0, 0))
            for name, each in zip(_SETS, self._sets, strict=True)
        )
        self._check_like("test", 0, first_of_test)
        self.shape, self._pixels = tuple(self._first[0].shape), self._first[0].dtype is torch.uint8
        self.whole_numbers = not (self._pixels or self._first[0].is_floating_point())
        self.normalize = self._normalization()
        self.targets = self._kind(self._first[1])
        self.classes, self.class_names = self._outputs(names)
        for name, each in zip(_SETS, self._sets, strict=True):
            if type(each) is TensorDataset and self.targets is not Targets.VALUES:
                self._check_classes(name, each.tensors[1])
        self._whole = [self._on_device(each) for each in self._sets]
        pinned = device.type != "cpu"
        self._pools: list[Pool[Samples]] = [Pool(self._read, config.workers, pinned=pinned) for _ in _SETS]

    # ------------------------------------------------------------ what the function returned

    def _call_function(self) -> tuple[Any, Any, Any]:
        found = load_function("data.name", self._config.name)(self._config.dir)
        if not isinstance(found, tuple | list) or len(found) not in (2, 3):
            shown = f"a {type(found).__name__} of {len(found)}" if isinstance(found, tuple | list) else f"{found!r:.60}"
            raise ConfigError(
                f"{self._what} returned {shown}; return (train, test), or (train, test, classes) for targets"
                " that are"
                " class numbers"
            )
        return found[0], found[1], found[2] if len(found) == 3 else None

    def _checked_set(self, name: str, found: Any) -> Any:
        """Check a set that the function returned, and return it as a Dataset.

        A pair of tensors becomes a TensorDataset with float32 or int64 values. Images may remain
        uint8. Raises ConfigError, DataError.
        """
        if type(found) is TensorDataset and len(found.tensors) == 2:
            found = found.tensors
        arrays = torch.Tensor, np.ndarray
        if isinstance(found, tuple | list) and len(found) == 2 and all(isinstance(it, arrays) for it in found):
            if found[0].ndim == 0 or found[1].ndim == 0 or len(found[0]) != len(found[1]):
                shapes = " and ".join(str(tuple(each.shape)) for each in found)
                raise ConfigError(
                    f"{self._what}: {name} is a pair of tensors of shapes {shapes}; provide as many targets as inputs"
                )
            parts = zip(_PARTS, found, strict=True)
            found = TensorDataset(*(self._convert(name, what, it, whole=True) for what, it in parts))
        if not hasattr(found, "__len__") or not hasattr(found, "__getitem__"):
            raise ConfigError(
                f"{self._what}: {name} is a {type(found).__name__}; provide a torch Dataset with __len__ and"
                " __getitem__ (not an IterableDataset), or a pair of tensors (inputs, targets)"
            )
        if len(found) == 0:
            raise DataError(f"{self._what}: {name} is empty; provide at least one sample")
        return found

    def _kind(self, target: torch.Tensor) -> Targets:
        if target.is_floating_point():
            return Targets.VALUES
        return Targets.CLASSES if target.ndim == 0 else Targets.NUMBERS

    def _outputs(self, names: Any) -> tuple[int, list[str] | None]:
        """Return the number of scores that a model must output, and the class names."""
        if self.targets is Targets.VALUES:
            if names is not None:
                raise ConfigError(
                    f"{self._what} returned classes {names!r:.60}, but train[0] has a float target; return"
                    " (train, test), or use integer targets"
                )
            return max(1, self._first[1].numel()), None
        if not isinstance(names, bool) and (number := _whole(names)) > 0:
            return number, None
        if isinstance(names, list | tuple) and names and all(isinstance(name, str) for name in names):
            return len(names), list(names)
        raise ConfigError(
            f"{self._what} returned {'no classes' if names is None else f'{names!r:.60} as classes'}, but"
            " train[0] has an integer target; return (train, test, classes), where classes is the number of"
            " classes or a list of their names, or use float targets"
        )

    def _check_classes(self, name: str, targets: torch.Tensor) -> None:
        if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < self.classes:
            number = int(((targets < 0) | (targets >= self.classes)).reshape(len(targets), -1).any(1).nonzero()[0])
            raise self._no_class(name, number)

    def _no_class(self, name: str, number: int) -> DataError:
        return DataError(
            f"{self._what}: the target of {name}[{number}] is outside 0..{self.classes - 1}; correct "
            "this target or the number of classes"
        )

    def _normalization(self) -> Normalize | None:
        """Return the normalization of uint8 images, or None if the inputs are not uint8 images.

        Raises ConfigError if a setting does not suit the inputs.
        """
        config, what = self._config, f"the inputs of data.name={self._config.name}"
        for key in ("shift", "flip", "mean", "std"):
            if getattr(config, key) and not self._pixels:
                raise ConfigError(
                    f"data.{key} needs uint8 images, but {what} are {self._first[0].dtype}; return "
                    f"uint8 from the function, or leave out data.{key}"
                )
        if not self._pixels:
            return None
        channels = self.shape[0]
        mean, std = (
            own or (known if channels == len(known) else (0.5,) * channels)
            for own, known in ((config.mean, IMAGENET_MEAN), (config.std, IMAGENET_STD))
        )
        if not (len(mean) == len(std) == channels and all(map(math.isfinite, mean)) and min(std) > 0):
            raise ConfigError(
                f"data.mean={list(mean)}, data.std={list(std)}: {what} have {channels} channels; set a finite mean and"
                " a std above 0 for each of them"
            )
        check_shift(config.shift, self.shape)
        return Normalize(255.0, mean, std, self._device)

    def _convert(self, name: str, what: str, value: Any, *, whole: bool = False) -> torch.Tensor:
        """Convert an input or target to a float32 or int64 tensor.

        `value` belongs to a single sample or, if `whole` is set, to the whole set. uint8 images
        remain uint8, in the shape (..., channels, height, width).
        """
        if isinstance(value, np.ndarray) and any(stride < 0 for stride in value.strides):
            # torch cannot read an array with negative strides, such as a mirrored view.
            value = value.copy()
        try:
            tensor = torch.as_tensor(value).detach()
        except (TypeError, ValueError, RuntimeError):
            tensor = None
        if what == _PARTS[0] and tensor is not None and tensor.dtype is torch.uint8:
            image = _channels_first(tensor, int(whole))
            if image is not None:
                return image
        if tensor is None or tensor.dtype is torch.bool or tensor.is_complex() or tensor.dtype is torch.uint8:
            kind = type(value).__name__ if tensor is None else tensor.dtype
            raise ConfigError(
                f"{self._what}: the {what} of a sample of {name} is {kind}; use a float or int64 "
                "tensor or numpy array, or, for images, uint8 (channels, height, width)"
            )
        return tensor.float() if tensor.is_floating_point() else tensor.long()

    # ------------------------------------------------------------ samples

    def _run_apart(self, each: Any, look: Callable[[], T]) -> T:
        """Run `look`, which reads a sample of `each`, and return its result.

        A Dataset may open a file when it reads its first sample. If the rank's process opened this
        file, all forked workers would share the position in the file. If workers will be forked,
        `look` therefore runs in a separate process.
        """
        workers = 0 if type(each) is TensorDataset else min(1, self._config.workers)
        # The pool's process ends together with the pool.
        pool: Pool[T] = Pool(lambda _: look(), workers, pinned=False)
        ((found,),) = pool.run(iter([Request(False, None, [0])]))
        return found

    def _read_one(self, name: str, number: int, epoch: int) -> Pair:
        """Return one sample, converted to tensors.

        The user's code may draw random numbers for the sample. They depend only on the seed, the
        sample's number and, in training, the epoch.
        """
        each = self._sets[_SETS.index(name)]
        with seed_draws(derive(self._config.seed, epoch if name == "train" else _TEST, number)):
            # `number` may stand for a version of a sample (data.repeats), so find the sample.
            found = each[number := number % len(each)]
        if not isinstance(found, tuple | list) or len(found) != 2:
            shown = f"a {type(found).__name__} of {len(found)}" if isinstance(found, Sized) else type(found).__name__
            raise ConfigError(f"{self._what}: {name}[{number}] is {shown}; return (input, target) from __getitem__")
        values, target = (self._convert(name, what, part) for what, part in zip(_PARTS, found, strict=True))
        return values, target

    def _check_like(self, name: str, number: int, sample: Pair) -> None:
        for what, first, own in zip(_PARTS, self._first, sample, strict=True):
            if own.shape != first.shape or own.dtype != first.dtype:
                raise DataError(
                    f"{self._what}: the {what} of {name}[{number}] is {own.dtype} of shape "
                    f"{tuple(own.shape)}, but the {what} of train[0] is {first.dtype} of shape "
                    f"{tuple(first.shape)}; pad or crop samples to the same shape"
                )

    def _read(self, request: Request) -> Samples:
        """Read the samples of a request, usually in a worker process."""
        name = _SETS[request.test]
        pairs = [self._read_one(name, number, request.epoch or 0) for number in request.numbers]
        for number, pair in zip(request.numbers, pairs, strict=True):
            number %= len(self._sets[request.test])
            self._check_like(name, number, pair)
            if self.targets is not Targets.VALUES and not 0 <= int(pair[1].min()) <= int(pair[1].max()) < self.classes:
                raise self._no_class(name, number)
        if not pairs:
            return Samples(*(part.new_empty(0, *part.shape) for part in self._first))
        return Samples(*(torch.stack(parts) for parts in zip(*pairs, strict=True)))

    # ------------------------------------------------------------ batches

    def train_stream(self, parts: Iterable[tuple[int, list[int]]]) -> Iterator[Batch]:
        """Yield an augmented training batch for each (epoch, numbers) pair in `parts`."""
        return self._batches(Request(False, epoch, part) for epoch, part in parts)

    def test_batches(self, parts: Iterable[list[int]]) -> Iterator[Batch]:
        """Yield a test batch for each list of sample numbers."""
        return self._batches((Request(True, None, part) for part in parts), test=True)

    def _batches(self, requests: Iterator[Request], *, test: bool = False) -> Iterator[Batch]:
        whole = self._whole[test]
        if whole is not None:
            for request in requests:
                numbers = torch.tensor(request.numbers, dtype=torch.int64).to(self._device, non_blocking=True)
                numbers = numbers % len(whole[1])
                yield self._finish(whole[0][numbers], whole[1][numbers], request)
            return
        asked, answered = tee(requests)
        for chunks in self._pools[test].run(asked):
            inputs, targets = (self._join(parts) for parts in zip(*chunks, strict=True))
            yield self._finish(inputs, targets, next(answered))

    def _join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join the chunks of a batch into one tensor on the device.

        Each chunk is copied to the device separately, because chunks are in pinned memory. A tensor
        joined in main memory would not be pinned, so copying it would wait for the device.
        """
        size = sum(map(len, parts))
        whole = torch.empty(size, *parts[0].shape[1:], dtype=parts[0].dtype, device=self._device)
        for own, part in zip(torch.split(whole, [len(part) for part in parts]), parts, strict=True):
            own.copy_(part, non_blocking=True)
        return whole

    def _finish(self, inputs: torch.Tensor, targets: torch.Tensor, request: Request) -> Batch:
        """Return the batch. If inputs are uint8 images, shift, mirror and normalize them on the
        device.
        """
        if self.normalize is None:
            return Batch(inputs, targets)
        config = self._config
        if request.epoch is not None and config.augment and (config.shift or config.flip) and request.numbers:
            numbers = np.array(request.numbers, dtype=np.int64)
            draws = torch.from_numpy(uniform(config.seed, request.epoch, numbers, 3))
            sides = draws
            if config.flip is Flip.ALTERNATING:
                sides = torch.from_numpy(uniform(config.seed, 0, numbers, 3))
            mirrored = is_mirrored(sides[:, 2], config.flip, request.epoch) & bool(config.flip)
            inputs = _shift_and_flip(inputs, draws, mirrored, config)
        return Batch(self.normalize(inputs), targets)

    def _on_device(self, each: Any) -> Pair | None:
        """Return a set's tensors on the device, or None if the set is read sample by sample."""
        if type(each) is not TensorDataset:
            return None
        values, targets = (part.to(self._device) for part in each.tensors)
        return values, targets

    def fingerprint(self) -> int:
        """Return a hash of the sizes, shapes and classes, and of part of the content.

        For a pair of tensors, the hash covers all targets and about a thousand inputs. For a
        Dataset with a `fingerprint` method, it covers the result of that method. For any other
        Dataset, it covers about 32 samples and the attribute `targets`.
        """
        parts: list[Any] = [
            repr((self.train_size, self.test_size, self.shape, self.classes, self.class_names)).encode()
        ]
        for name, each, size in zip(_SETS, self._sets, (self.train_size, self.test_size), strict=True):
            if type(each) is TensorDataset:
                values, targets = each.tensors
                parts += [targets.cpu().numpy(), values[:: max(1, size // _TENSORS_LOOKED_AT)].cpu().numpy()]
            else:
                parts += self._run_apart(each, partial(self._look_at, name, each, size))
        return fingerprint(*parts)

    def _look_at(self, name: str, each: Any, size: int) -> list[Any]:
        """Return the parts of a Dataset that its fingerprint covers."""
        if hasattr(each, "fingerprint"):
            return [repr(each.fingerprint()).encode()]
        numbers = range(0, size, max(1, size // _LOOKED_AT))
        parts: list[Any] = [part.numpy() for number in numbers for part in self._read_one(name, number, 0)]
        listed = getattr(each, "targets", None)
        if isinstance(listed, list | tuple | np.ndarray | torch.Tensor):
            # `targets` may be ragged, or in memory that numpy cannot read.
            with suppress(TypeError, ValueError, RuntimeError):
                table = np.asarray(listed)
                # The bytes of an array of objects would be addresses in this process.
                if not table.dtype.hasobject:
                    parts.append(table)
        return parts


_PARTS = ("input", "target")


def _channels_first(pixels: torch.Tensor, first: int) -> torch.Tensor | None:
    """Return images with their channels at dimension `first`, or None for inputs of other shapes.

    From dimension `first` on, images have the shape (channels, height, width), (height, width,
    channels) or (height, width), with 1, 3 or 4 channels.
    """
    shape = pixels.shape[first:]
    if len(shape) == 2:
        return pixels.unsqueeze(first)
    if len(shape) != 3 or not any(side in (1, 3, 4) for side in (shape[0], shape[2])):
        return None
    return pixels if shape[0] in (1, 3, 4) else pixels.movedim(-1, first).contiguous()


def _shift_and_flip(
    images: torch.Tensor, draws: torch.Tensor, mirrored: torch.Tensor, config: DataConfig
) -> torch.Tensor:
    """Shift all images (n, channels, height, width), and mirror some of them.

    `draws` are (n, 3) uniform numbers, of which the first two determine the shift. `mirrored` (n,)
    selects the images to mirror. `CropAndFlip` would compute the same images, but needs the whole
    set in memory.
    """
    most, (height, width) = config.shift, images.shape[2:]
    top, left = ((draws[:, axis] * (2 * most + 1)).long()[:, None] for axis in (0, 1))
    rows, columns = top + torch.arange(height), left + torch.arange(width)
    columns = torch.where(mirrored[:, None], columns.flip(1), columns)
    each = torch.arange(len(images))[:, None, None]
    places = [part.to(images.device, non_blocking=True) for part in (each, rows[:, :, None], columns[:, None, :])]
    padded = pad(images, most, config.padding).permute(0, 2, 3, 1)
    return padded[places[0], places[1], places[2]].permute(0, 3, 1, 2).contiguous()


def _whole(value: Any) -> int:
    """Convert a whole number, even from numpy or torch, to an int. Return 0 for other values."""
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):
        return 0

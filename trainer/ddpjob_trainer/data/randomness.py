"""Random numbers as functions of (seed, epoch, sample, stream), never of a rank or earlier draws.

splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014) is used as a
hash of a counter.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 0xFFFFFFFFFFFFFFFF


def mix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the result of splitmix64's finalizer for each value."""
    z = values.astype(np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def derive(*parts: int) -> int:
    """Return a 63-bit seed derived from several numbers.

    Every micro-batch needs a seed, so this function uses Python integers. A one-element array would
    take twenty times as long.
    """
    return derive_state(*parts) >> 1


def derive_state(*parts: int) -> int:
    """Return the 64-bit state of `derive` after these parts.

    More parts can be added to the state later.
    """
    state = 0
    for part in parts:
        z = (state ^ ((part + 1) * _GOLDEN)) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        state = z ^ (z >> 31)
    return state


def derive_for_all(seed: int, epoch: int, numbers: npt.NDArray[np.int64], last: int) -> npt.NDArray[np.uint64]:
    """Return `derive(seed, epoch, number, last)` for all `numbers`."""
    golden = np.uint64(_GOLDEN)
    state = mix64(np.uint64(derive_state(seed, epoch)) ^ ((numbers.astype(np.uint64) + np.uint64(1)) * golden))
    return mix64(state ^ np.uint64((last + 1) * _GOLDEN & _MASK)) >> np.uint64(1)


def twister_words(seeds: npt.NDArray[np.uint64], count: int) -> npt.NDArray[np.uint32]:
    """Return the first `count` words that torch's CPU generator draws for each of n seeds.

    The result is (count, n). The generator is MT19937 (Matsumoto, Nishimura, 1998), and uses only
    the last 32 bits of a seed.
    """
    one, words = np.uint32(1), []
    state = [seeds.astype(np.uint32)]
    for k in range(1, min(624, 397 + count)):
        state.append(np.uint32(1812433253) * (state[-1] ^ (state[-1] >> np.uint32(30))) + np.uint32(k))
    for k in range(count):
        mixed = (state[k % 624] & np.uint32(0x80000000)) | (state[(k + 1) % 624] & np.uint32(0x7FFFFFFF))
        word = state[(k + 397) % 624] ^ (mixed >> one) ^ ((mixed & one) * np.uint32(0x9908B0DF))
        state[k % 624] = word
        word = word ^ (word >> np.uint32(11))
        word = word ^ ((word << np.uint32(7)) & np.uint32(0x9D2C5680))
        word = word ^ ((word << np.uint32(15)) & np.uint32(0xEFC60000))
        words.append(word ^ (word >> np.uint32(18)))
    return np.stack(words)


def uniform(seed: int, epoch: int, samples: npt.NDArray[np.int64], streams: int) -> npt.NDArray[np.float64]:
    """Return `streams` uniform numbers in [0, 1) for each sample, (len(samples), streams).

    Row i depends only on seed, epoch and samples[i].
    """
    base = np.uint64(derive(seed, epoch))
    keys = mix64(base + (samples.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN))
    counters = np.arange(1, streams + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return (mix64(keys[:, None] + counters[None, :]) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def uniform_for_all(seed: int, epoch: int, count: int, streams: int, device: torch.device) -> torch.Tensor:
    """Return the result of `uniform` for samples 0 to count - 1, computed on the device.

    All bits are identical to those of `uniform`. The device needs only a handful of kernels, but
    the CPU would need milliseconds, and longer while a thread writes a checkpoint. torch cannot
    shift uint64 on all devices, so the computation uses int64, which wraps around in the same way.
    """
    golden = _signed(_GOLDEN)
    keys = _mix64_signed((torch.arange(count, device=device) + 1) * golden + derive(seed, epoch))
    counters = torch.arange(1, streams + 1, device=device) * golden
    return _shift_right(_mix64_signed(keys[:, None] + counters), 11).double() * 2.0**-53


def _mix64_signed(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _shift_right(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift_right(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift_right(z, 31)


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift to the right, and fill with zeros instead of the sign."""
    return (z >> bits) & (_MASK >> bits)


def _signed(number: int) -> int:
    """Return the signed number that has the same bits as an unsigned 64-bit number."""
    return number - 2**64 if number >> 63 else number


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch's generators for the CPU and the device. Dropout draws from these generators.

    torch.manual_seed would take 0.1 ms longer at every step. If CUDA is not initialized, it records
    a stack trace for each device.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        module = torch.get_device_module(device)
        # `manual_seed` seeds the generator of the current device, which may differ from `device`.
        with module.device(device):
            module.manual_seed(seed)


@contextmanager
def seed_draws(key: int) -> Iterator[None]:
    """Make the random numbers drawn during the `with` block depend only on `key`.

    This applies to the global generators of Python, numpy and torch. After the block, these
    generators continue from their earlier state.
    """
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])

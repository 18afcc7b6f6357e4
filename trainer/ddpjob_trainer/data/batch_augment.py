"""RandAugment and TrivialAugment for a whole batch, with the same results as `augment.RandAugment`.

Problem: augmenting 128 images one by one launches 5,350 kernels, more than the training step
itself. On a GPU, launching the kernels takes more time than processing the pixels.

Rule: images with the same kind of operation are processed together. Each round sorts the batch by
kind. The images of a kind are then a slice of the batch, which can be changed in place:

    warped      shear, translation, rotation: a table has torchvision's sampling grid per magnitude
    blended     contrast, color, sharpness: image * scale + other * alpha, clamped, rounded down
    mapped      brightness, posterize, solarize: a table has the new value of each of 256 values
    leveled     autocontrast, equalize: tables by a channel's range, or by a pixel's rank in it

Example: of 128 images, 46 are warped by one `grid_sample`, although each has its own angle.

The results have the same bits as torchvision's, because torchvision's own functions fill the
tables. Where torchvision's kernels use a fused multiply-add, this module computes the sum in
float64, which is exact, and rounds it once. The random numbers are those of a torch generator that
is seeded for each image, but all numbers of an epoch are computed at once. Results were compared on
CPUs, but not on a GPU.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import conv2d, grid_sample, pad
from torch.overrides import TorchFunctionMode

from ddpjob_trainer.data.augment import RANDAUGMENT, CropAndFlip, RandAugment
from ddpjob_trainer.data.randomness import derive_for_all, twister_words

_WARPED, _CONTRAST, _COLOR, _SHARP, _MAPPED, _AUTO, _EQUALIZE = range(1, 8)
_KINDS = {
    "Identity": 0,
    **dict.fromkeys(("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"), _WARPED),
    "Contrast": _CONTRAST,
    "Color": _COLOR,
    "Sharpness": _SHARP,
    **dict.fromkeys(("Brightness", "Posterize", "Solarize"), _MAPPED),
    "AutoContrast": _AUTO,
    "Equalize": _EQUALIZE,
}
_BINS, _BLOCK = 31, 4096


class BatchAugment:
    """Crops, flips and augments all images in a batch at once, on the device that holds the set."""

    def __init__(self, crop: CropAndFlip, images: torch.Tensor, augment: RandAugment, seed: int, versions: int) -> None:
        """Prepare the tables of all operations.

        `images` is the whole set, (n, 3, height, width) uint8. `versions` is the total number of
        versions of all images (data.repeats).
        """
        self._crop, self._seed, self._versions, self._epoch = crop, seed, versions, -1
        self._rounds, self._bin = augment.operations or 1, augment.magnitude if augment.operations else None
        self._signed = np.array([signed for _, signed in augment.space.values()])
        height, width = images.shape[2:]
        magnitudes = [values(_BINS, height, width) for values, _ in augment.space.values()]
        self._sized = np.array([found is not None for found in magnitudes])
        # A code is a number that stands for an operation with a magnitude and a sign.
        codes = len(magnitudes) * _BINS * 2
        self._kind, self._row = np.zeros(codes, np.int64), np.zeros(codes, np.int64)
        self._scale, self._alpha = np.zeros(codes), np.zeros(codes)
        grids, maps = list[torch.Tensor](), list[torch.Tensor]()
        ramp = torch.arange(256, dtype=torch.uint8, device=images.device).expand(3, 1, 256)
        for code in range(codes):
            number, rest = divmod(code, _BINS * 2)
            if self._bin not in (None, rest // 2) and self._sized[number]:
                continue
            name, found = list(augment.space)[number], magnitudes[number]
            size = 0.0 if found is None else float(found[rest // 2]) * (-1 if rest % 2 else 1)
            self._kind[code] = kind = _KINDS[name]
            if kind == _WARPED:
                self._row[code] = len(grids)
                grids.append(_grid(name, size, images[:1]))
            elif kind == _MAPPED and (not rest % 2 or self._signed[number]):
                self._row[code] = len(maps)
                maps.append(_map(name, size, ramp)[0, 0].float())
            elif kind in (_CONTRAST, _COLOR, _SHARP):
                self._scale[code] = 1.0 if kind == _SHARP else np.float32(1.0 + size)
                self._alpha[code] = np.float32(1.0 - (1.0 + size))
        self._grids, self._maps = torch.cat(grids), torch.stack(maps)
        self._levels = _levels(height * width, ramp)
        side, middle = 1.0 / 13.0, 5.0 / 13.0
        kernel = [[side] * 3, [side, middle, side], [side] * 3]
        self._blur = torch.tensor(kernel, device=images.device).expand(3, 1, 3, 3)

    def __call__(self, numbers: torch.Tensor, epoch: int) -> torch.Tensor:
        """Return the images that `numbers` select, as augmented in an epoch.

        The result is (n, 3, height, width) float32, with values from 0 to 255. `numbers` are int64
        (n,), in main memory.
        """
        if epoch != self._epoch:
            self._codes, self._epoch = self._draw(epoch), epoch
        codes = self._codes[numbers.numpy()]
        orders = [np.argsort(self._kind[drawn], kind="stable") for drawn in codes.T]
        drawn = [codes[order, number] for number, order in enumerate(orders)]
        kinds = [self._kind[each] for each in drawn]
        counts = [np.bincount(kind, minlength=8).tolist() for kind in kinds]
        back = [np.argsort(order) for order in orders]
        moves = [back[k][order] for k, order in enumerate(orders[1:])] + back[-1:]
        blends = [each[(kind >= _CONTRAST) & (kind <= _SHARP)] for each, kind in zip(drawn, kinds, strict=True)]
        parts = [self._row[each[kind == _WARPED]] for each, kind in zip(drawn, kinds, strict=True)]
        parts += [self._row[each[kind == _MAPPED]] for each, kind in zip(drawn, kinds, strict=True)]
        parts += [table[each].view(np.int64) for each in blends for table in (self._scale, self._alpha)]
        parts += moves
        # Send all numbers that the step needs in one transfer, and look up each table only once.
        sent = torch.from_numpy(np.concatenate(parts)).to(self._grids.device, non_blocking=True)
        split, rounds = torch.split(sent, [len(part) for part in parts]), self._rounds
        warps, maps = sum(map(len, parts[:rounds])), sum(map(len, parts[rounds : 2 * rounds]))
        grids = torch.split(self._grids[sent[:warps]], [len(part) for part in parts[:rounds]])
        tables = torch.split(self._maps[sent[warps : warps + maps]], [len(part) for part in parts[rounds : 2 * rounds]])
        images = self._crop(numbers[torch.from_numpy(orders[0])], epoch).float()
        for number in range(rounds):
            scale, alpha = (split[2 * (rounds + number) + k].view(torch.float64).view(-1, 1, 1, 1) for k in (0, 1))
            self._apply(images, counts[number], grids[number], scale, alpha, tables[number])
            images = images[split[4 * rounds + number]]
        return images

    def _apply(
        self,
        images: torch.Tensor,
        counts: list[int],
        grids: torch.Tensor,
        scale: torch.Tensor,
        alpha: torch.Tensor,
        tables: torch.Tensor,
    ) -> None:
        """Apply the operations of one round, in place.

        `images` are sorted by the kind of operation. `counts` has the number of images of each
        kind.
        """
        _, warped, *_, mapped, auto, equalized = torch.split(images, counts)
        ends = np.cumsum(counts).tolist()
        if len(warped):
            torch.round(grid_sample(warped, grids, padding_mode="zeros", align_corners=False), out=warped)
        if len(scale):
            self._blend(images[ends[_WARPED] : ends[_SHARP]], counts[_CONTRAST : _SHARP + 1], scale, alpha)
        values = images[ends[_SHARP] :].flatten(1).long()
        if len(mapped):
            torch.gather(tables, 1, values[: len(mapped)], out=mapped.flatten(1))
        if rest := len(auto) + len(equalized):
            pixels, level = values[-rest:].view(3 * rest, -1), images[-rest:].view(3 * rest, -1)
            ordered, first = pixels.sort(1).values, 3 * len(auto)
            row, column = pixels.new_empty(len(pixels), 1), torch.empty_like(pixels)
            torch.sub(ordered[:first, :1], ordered[:first, -1:], out=row[:first])
            torch.sub(pixels[:first], ordered[:first, :1], out=column[:first])
            torch.searchsorted(ordered[first:], pixels[first:], out=column[first:])
            torch.floor_divide(column[first:].amax(1, keepdim=True), 255, out=row[first:])
            # Row 0 means that the channel remains unchanged.
            torch.where(row.bool(), self._levels[row, column], level, out=level)

    def _blend(self, images: torch.Tensor, counts: list[int], scale: torch.Tensor, alpha: torch.Tensor) -> None:
        contrast, _, sharp = torch.split(images, counts)
        red, green, blue = images[: len(images) - len(sharp)].unbind(1)
        gray = red.mul(0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114).floor_().unsqueeze(1)
        mean = gray[: len(contrast)].mean((1, 2, 3), keepdim=True)
        # As in torchvision, sharpness blends each image with a blurred version, but leaves the
        # border unchanged.
        blurred = conv2d(sharp, self._blur, groups=3).round_().sub_(sharp[..., 1:-1, 1:-1])
        size = (-1, *images.shape[1:])
        other = torch.cat([mean.expand(size), gray[len(contrast) :].expand(size), pad(blurred, (1, 1, 1, 1))])
        scaled = torch.mul(images, scale, out=torch.empty_like(images))
        torch.addcmul(scaled, other, alpha, out=images).clamp_(0, 255).floor_()

    def _draw(self, epoch: int) -> npt.NDArray[np.int16]:
        """Return the codes of the operations for each version in an epoch, (versions, rounds)."""
        blocks = []
        for start in range(0, self._versions, _BLOCK):
            numbers = np.arange(start, min(start + _BLOCK, self._versions))
            seeds = derive_for_all(self._seed, epoch, numbers, RANDAUGMENT)
            words = twister_words(seeds, self._rounds * 3)
            place, index = np.zeros(len(numbers), np.int64), np.arange(len(numbers))
            codes = np.zeros((len(numbers), self._rounds), np.int16)
            for number in range(self._rounds):
                operation = words[place, index] % len(self._sized)
                place += 1
                size = np.full(len(numbers), self._bin or 0)
                if self._bin is None:
                    sized = self._sized[operation]
                    size = np.where(sized, words[place, index] % _BINS, 0)
                    place += sized
                signed = self._signed[operation]
                # torch's generator makes a float32 from the last 24 bits of a word.
                negative = signed & ((words[place, index] & 0xFFFFFF) <= 1 << 23)
                place += signed
                codes[:, number] = operation * (_BINS * 2) + size * 2 + negative
            blocks.append(codes)
        return np.concatenate(blocks)


class _SeenGrid(TorchFunctionMode):
    """Records the grid that torchvision passes to grid_sample."""

    grid: torch.Tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "grid_sample" in getattr(func, "__name__", ""):
            self.grid = args[1]
        return func(*args, **(kwargs or {}))


def _grid(name: str, size: float, image: torch.Tensor) -> torch.Tensor:
    """Return the sampling grid (1, height, width, 2) that torchvision uses to warp `image`.

    `name` is a geometric operation, and `size` is its magnitude.
    """
    from torchvision.transforms import v2

    bilinear, sheared = v2.InterpolationMode.BILINEAR, math.degrees(math.atan(size))
    with _SeenGrid() as seen:
        # Specify the center. Without it, torchvision does not use a sampling grid for multiples of
        # 90 degrees.
        if name == "Rotate":
            center = [image.shape[-1] * 0.5, image.shape[-2] * 0.5]
            v2.functional.rotate(image, size, bilinear, center=center)
        elif name.startswith("Shear"):
            shear = [sheared, 0.0] if name == "ShearX" else [0.0, sheared]
            v2.functional.affine(image, 0.0, [0, 0], 1.0, shear, bilinear, center=[0, 0])
        else:
            moved = [int(size), 0] if name == "TranslateX" else [0, int(size)]
            v2.functional.affine(image, 0.0, moved, 1.0, [0.0, 0.0], bilinear)
    grid: torch.Tensor = seen.grid
    return grid


def _map(name: str, size: float, ramp: torch.Tensor) -> torch.Tensor:
    """Return a table with the new value of each pixel value from 0 to 255.

    `name` is an operation that maps each value separately, and `size` is its magnitude. `ramp`
    contains all values.
    """
    from torchvision.transforms.v2 import functional

    if name == "Brightness":
        found = functional.adjust_brightness(ramp, 1.0 + size)
    elif name == "Posterize":
        found = functional.posterize(ramp, int(size))
    else:
        found = functional.solarize(ramp, 255 * size)
    values: torch.Tensor = found
    return values


def _levels(pixels: int, ramp: torch.Tensor) -> torch.Tensor:
    """Return a table with the new pixel values for equalize and autocontrast.

    A channel has `pixels` pixels. The channel determines the row of the table, and each of its
    pixels determines a column.

    For equalize, let n be the number of pixels below the channel's largest value. The row is n //
    255; row 0 is not used. A pixel's column is the number of pixels with a smaller value.

    For autocontrast, the row is the channel's smallest value minus its largest value. A negative
    row counts from the end of the table. A pixel's column is the pixel's value minus the smallest
    value.
    """
    from torchvision.transforms.v2 import functional

    steps = pixels // 255
    table = torch.zeros(steps + 256, max(256, pixels), device=ramp.device)
    rank = torch.arange(pixels, device=ramp.device)
    for step in range(1, steps + 1):
        table[step, :pixels] = ((rank + step // 2) // step).clamp(0, 255)
    spans = ramp[:1].expand(256, 1, 1, 256).minimum(ramp[0].view(256, 1, 1, 1))
    table[-255:, :256] = functional.autocontrast(spans)[1:, 0, 0].flip(0).float()
    return table

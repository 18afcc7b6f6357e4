"""Decodes an image to uint8 pixels: libjpeg-turbo for JPEG, Pillow for everything else.

A JPEG is decoded at a reduced size if the crop is large enough. Images are resampled as torchvision
resamples tensors (bilinear with antialiasing), but torchvision itself is not used, because
importing it takes seconds.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_JPEG = b"\xff\xd8\xff"
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""Accepted formats. The content of a file, not its name, determines the format. Pillow supports
many other formats, some of which are unsafe. For example, its EPS decoder runs Ghostscript.
"""
MOST_PIXELS = 178_956_970
"""Maximum number of pixels in an image, which is Pillow's own limit. A file can declare any size,
and decoding takes up to 18 bytes per pixel.
"""
MOST_BYTES = 6 * MOST_PIXELS
"""Maximum size of an encoded image in bytes: MOST_PIXELS pixels of three 16-bit channels, without
compression.
"""
_MOST_SCANS = 500
"""Maximum number of scans in a progressive JPEG. Encoders write about 10. A file could contain a
huge number of tiny scans, and decoding each one takes a pass over all pixels.
"""
_TILE_WIDTH, _TILE_LENGTH = 322, 323  # tags in TIFF files
# Factors by which a JPEG may be reduced during decoding. libjpeg-turbo has vectorized code for
# these factors. The factors between them cost more time than they save.
_SCALES = (8, 4, 2)
TEST_CROP = 224 / 256
"""Ratio of the center crop's side to a test image's shorter side (He et al., Deep residual
learning, 2015).
"""


class UnreadableImage(Exception):
    """Raised if bytes are not a complete image. The message is the decoder's reason."""


@dataclass(frozen=True)
class Box:
    """A rectangle in an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


def crop(content: bytes, choose: Callable[[int, int], Box], size: int) -> torch.Tensor:
    """Decode an image, and return a box of it, scaled to (3, size, size) uint8.

    `choose(height, width)` returns the box for an image of that size. Raises UnreadableImage.
    """
    pixels, box = _decode(content, choose, size)
    rows, columns = slice(box.top, box.top + box.height), slice(box.left, box.left + box.width)
    return _resize(pixels[:, rows, columns], size, size)


def middle(content: bytes, size: int, share: float = TEST_CROP) -> torch.Tensor:
    """Decode an image, scale its shorter side to `size` / `share`, and return the center.

    The result is (3, size, size) uint8. Like torchvision's Resize and CenterCrop, this function
    always decodes all pixels, because a test result must not depend on how images are decoded.
    Raises UnreadableImage.
    """
    pixels, _ = _decode(content, lambda height, width: Box(0, 0, height, width), None)
    height, width = pixels.shape[1:]
    short = round(size / share)
    shorter, longer = min(height, width), max(height, width)
    long = int(short * longer / shorter)
    # An image with a single line of 65,535 pixels would be scaled to 4 billion pixels.
    check_pixels(short, long)
    resized = _resize(pixels, *((short, long) if height <= width else (long, short)))
    top, left = (round((side - size) / 2) for side in resized.shape[1:])
    return resized[:, top : top + size, left : left + size]


def shrink(content: bytes, side: int, quality: int) -> bytes | None:
    """Scale an image down until its longer side is `side`, and return it as a JPEG.

    Return None if the image is already small enough. Colours have half the resolution (4:2:0), as
    in most JPEGs. Raises UnreadableImage.
    """
    if max(size_of(content)) <= side:
        return None
    import simplejpeg

    pixels, _ = _decode(content, lambda height, width: Box(0, 0, height, width), None)
    height, width = (max(1, round(length * side / max(pixels.shape[1:]))) for length in pixels.shape[1:])
    scaled = _resize(pixels, height, width).permute(1, 2, 0).contiguous().numpy()
    encoded: bytes = simplejpeg.encode_jpeg(scaled, quality, colorsubsampling="420")
    return encoded


def size_of(content: bytes) -> tuple[int, int]:
    """Return (height, width) from the header of an encoded image. Raises UnreadableImage."""
    _check_scans(content)
    with _open_image(content) as image:
        return image.height, image.width


def check_pixels(height: int, width: int) -> None:
    """Raise UnreadableImage for an image of more than MOST_PIXELS pixels."""
    if height * width > MOST_PIXELS:
        raise UnreadableImage(f"it has {width} x {height} pixels, more than {MOST_PIXELS:,}; scale it down")


def _check_scans(content: bytes) -> None:
    scans = content.count(b"\xff\xda") if content[:3] == _JPEG else 0
    if scans > _MOST_SCANS:
        raise UnreadableImage(f"it has {scans} scans, more than {_MOST_SCANS}; save it as a baseline JPEG")


def _resize(pixels: torch.Tensor, height: int, width: int) -> torch.Tensor:
    if pixels.shape[1:] == (height, width):
        return pixels
    return torch.nn.functional.interpolate(pixels[None], (height, width), mode="bilinear", antialias=True)[0]


def _decode(content: bytes, choose: Callable[[int, int], Box], size: int | None) -> tuple[torch.Tensor, Box]:
    """Return the pixels of an image, (3, height, width), and the chosen box.

    If `size` is given, the caller needs only a crop of that size, and a JPEG may be decoded at a
    reduced size. The box then refers to the reduced image.
    """
    if content[:3] == _JPEG:
        import simplejpeg

        _check_scans(content)
        try:
            height, width, colours, _ = simplejpeg.decode_jpeg_header(content)
            check_pixels(height, width)
            if colours not in ("CMYK", "YCCK"):  # Only Pillow converts CMYK and YCCK to RGB.
                box = choose(height, width)
                scale = _scale(box, size)
                pixels = simplejpeg.decode_jpeg(content, min_height=-(-height // scale), min_width=-(-width // scale))
                return _planes(pixels), _scale_box(box, pixels.shape[0] / height, pixels.shape[1] / width)
        except ValueError:
            # The error may be only a warning from libjpeg. Let Pillow decide whether the file is
            # broken.
            pass
    pixels = _decode_with_pillow(content)
    return _planes(pixels), choose(*pixels.shape[:2])


def _scale(box: Box, size: int | None) -> int:
    if size is None:
        return 1
    return next((scale for scale in _SCALES if min(box.height, box.width) >= scale * size), 1)


def _scale_box(box: Box, down: float, across: float) -> Box:
    """Convert a box to the coordinates of a reduced image, rounded to whole pixels.

    The image's height was scaled by `down`, and its width by `across`.
    """
    if down == across == 1:
        return box
    top, left = round(box.top * down), round(box.left * across)
    bottom, right = round((box.top + box.height) * down), round((box.left + box.width) * across)
    return Box(top, left, max(1, bottom - top), max(1, right - left))


def _decode_with_pillow(content: bytes) -> npt.NDArray[np.uint8]:
    with _open_image(content) as image:
        sixteen = image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM")
        # Pillow's own conversion would clip values at 255, so most 16-bit images would become
        # white.
        if sixteen:
            grey = (np.asarray(image) >> 8).astype(np.uint8)
            return np.broadcast_to(grey[..., None], (*grey.shape, 3)).copy()
        if image.mode in ("I", "F"):
            raise UnreadableImage("its pixels have 32 bits, so it is unknown which value is white; save it with 8 bits")
        return np.array(image if image.mode == "RGB" else image.convert("RGB"))


@contextmanager
def _open_image(content: bytes) -> Iterator[Any]:
    """Open an image with Pillow, and check its size before its pixels are decoded.

    Damaged files make Pillow raise almost any exception, here or in the body of the `with`. Raises
    UnreadableImage instead of such an exception.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        # Check the size before opening a WebP image, because Pillow allocates the memory for
        # decoding as soon as it opens the image.
        if size := _webp_size(content):
            check_pixels(*size)
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            check_pixels(image.height, image.width)
            # libtiff decodes whole tiles, so a tile must not be too large either.
            tags: Any = getattr(image, "tag_v2", {})
            check_pixels(*(tags.get(tag, 0) for tag in (_TILE_LENGTH, _TILE_WIDTH)))
            yield image
    except (UnreadableImage, MemoryError):
        raise
    except UnidentifiedImageError as error:
        known = ", ".join(_FORMATS)
        raise UnreadableImage(f"not a known image format ({known})" if content else "an empty file") from error
    except Exception as error:
        raise UnreadableImage(str(error) or type(error).__name__) from error


def _webp_size(content: bytes) -> tuple[int, int] | None:
    """Return (height, width) from the header of a WebP image, or None for other formats.

    The size is in the first chunk, which is an extended, lossless or lossy header
    (https://developers.google.com/speed/webp/docs/riff_container).
    """
    if content[:4] != b"RIFF" or content[8:12] != b"WEBP":
        return None
    content = content[:30].ljust(30, b"\0")  # a lossless header has only 25 bytes
    low, high = (int.from_bytes(content[start : start + 4], "little") for start in (21, 26))
    match content[12:16]:
        case b"VP8X":
            width, height = (int.from_bytes(content[start : start + 3], "little") + 1 for start in (24, 27))
        case b"VP8L":
            width, height = (low & 0x3FFF) + 1, (low >> 14 & 0x3FFF) + 1
        case _:
            width, height = high & 0x3FFF, high >> 16 & 0x3FFF
    return height, width


def _planes(pixels: npt.NDArray[np.uint8]) -> torch.Tensor:
    return torch.from_numpy(pixels).permute(2, 0, 1)

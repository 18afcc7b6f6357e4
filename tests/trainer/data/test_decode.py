"""Decoding agrees with the functions of torchvision and Pillow, at full and at reduced size."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from ddpjob_trainer.data import decode
from ddpjob_trainer.data.decode import Box, UnreadableImage, crop, middle
from PIL import Image, ImageFile, WebPImagePlugin


@pytest.fixture(scope="module")
def photograph() -> Image.Image:
    from sklearn.datasets import load_sample_image

    return Image.fromarray(load_sample_image("china.jpg"))


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def box(top: int, left: int, height: int, width: int) -> Callable[[int, int], Box]:
    return lambda *_: Box(top, left, height, width)


def by_pillow(content: bytes) -> torch.Tensor:
    return torch.from_numpy(np.array(Image.open(io.BytesIO(content)).convert("RGB"))).permute(2, 0, 1)


def by_torchvision(content: bytes, where: Box, size: int) -> torch.Tensor:
    from torchvision.transforms.v2 import functional

    result: torch.Tensor = functional.resized_crop(
        by_pillow(content), where.top, where.left, where.height, where.width, [size, size], antialias=True
    )
    return result


@pytest.mark.parametrize("where", [Box(3, 11, 300, 400), Box(0, 0, 427, 640), Box(100, 200, 64, 64), Box(7, 5, 20, 33)])
def test_a_crop_matches_torchvision_if_no_reduced_size_fits(photograph: Image.Image, where: Box) -> None:
    content = encoded(photograph, quality=90)
    size = 224 if min(where.height, where.width) < 448 else 320
    pixels = crop(content, box(where.top, where.left, where.height, where.width), size)
    reference = by_torchvision(content, where, size)
    assert pixels.shape == (3, size, size) and pixels.dtype == torch.uint8
    assert (pixels.int() - reference.int()).abs().max() <= 2, "two builds of libjpeg-turbo may differ by this much"


@pytest.mark.parametrize("scale", [2, 4, 8])
def test_a_crop_decoded_at_reduced_size_is_nearly_the_same_picture(
    photograph: Image.Image, scale: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = photograph.resize((640 * scale, 427 * scale), Image.Resampling.BICUBIC)
    content = encoded(large, quality=90)
    where = Box(30 * scale, 50 * scale, 300 * scale, 400 * scale)
    shape: list[tuple[int, ...]] = []
    planes = decode._planes
    monkeypatch.setattr(decode, "_planes", lambda pixels: shape.append(pixels.shape) or planes(pixels))
    pixels = crop(content, box(where.top, where.left, where.height, where.width), 224)
    assert shape == [(427, 640, 3)], "the image was decoded at the reduced size"
    difference = (pixels.int() - by_torchvision(content, where, 224).int()).abs().float()
    assert difference.mean() < 2 and difference.quantile(0.99) < 16
    shifted = (
        pixels.int()
        - by_torchvision(content, Box(where.top, where.left + 4 * scale, where.height, where.width), 224).int()
    ).abs()
    assert shifted.float().mean() > 5, "a crop that is off by two pixels is detected"


def test_the_center_crop_matches_torchvisions_resize_and_center_crop(photograph: Image.Image) -> None:
    import torchvision.transforms.v2 as v2

    for shown in (
        photograph,
        photograph.rotate(90, expand=True),
        photograph.resize((1500, 1001)),
        photograph.resize((90, 61)),
    ):
        content = encoded(shown, quality=90)
        reference = v2.Compose([v2.Resize(256, antialias=True), v2.CenterCrop(224)])(by_pillow(content))
        assert (middle(content, 224).int() - reference.int()).abs().max() <= 2


def test_jpeg_pixels_match_pillow(photograph: Image.Image) -> None:
    for options in ({"quality": 90}, {"quality": 50, "subsampling": 0}, {"quality": 75, "progressive": True}):
        content = encoded(photograph, **options)
        pixels = crop(content, box(0, 0, 224, 224), 224)
        assert (pixels.int() - by_pillow(content)[:, :224, :224].int()).abs().max() <= 2


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP", "TIFF", "PPM", "GIF"])
def test_other_formats_are_read_as_pillow_reads_them(photograph: Image.Image, kind: str) -> None:
    small = photograph.resize((64, 48))
    content = encoded(small, kind, **({"lossless": True} if kind == "WEBP" else {}))
    pixels = crop(content, box(8, 8, 32, 32), 32)
    assert torch.equal(pixels, by_pillow(content)[:, 8:40, 8:40])


@pytest.mark.parametrize("mode", ["L", "CMYK", "RGBA", "P", "1", "I;16"])
def test_images_in_every_colour_mode_get_three_channels(photograph: Image.Image, mode: str) -> None:
    small = photograph.resize((64, 48))
    image = (
        Image.fromarray(np.asarray(small.convert("L")).astype(np.uint16) * 256)
        if mode == "I;16"
        else small.convert(mode)
    )
    content = encoded(image, "JPEG" if mode in ("L", "CMYK") else "PNG")
    assert crop(content, box(0, 0, 48, 64), 32).shape == (3, 32, 32)
    if mode == "CMYK":
        assert torch.equal(crop(content, box(0, 0, 32, 32), 32), by_pillow(content)[:, :32, :32])


@pytest.mark.parametrize(("kind", "order"), [("PNG", "<"), ("TIFF", "<"), ("TIFF", ">"), ("PPM", "<")])
def test_a_16_bit_grey_image_is_read_like_its_8_bit_version(photograph: Image.Image, kind: str, order: str) -> None:
    """Pillow's own conversion clips values at 255, so a 16-bit image becomes entirely white."""
    grey = photograph.resize((64, 48)).convert("L")
    low = np.random.default_rng(0).integers(0, 256, (48, 64))  # the low bits, which 8 bits cannot hold
    fine = Image.fromarray((np.asarray(grey).astype(np.uint16) * 256 + low).astype(f"{order}u2"))
    pixels = middle(encoded(fine, kind), 32)
    assert torch.equal(pixels, middle(encoded(grey, "PNG"), 32))
    assert pixels.float().std() > 10


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_images_with_32_bit_pixels_are_refused_because_their_white_is_unknown(kind: type[Any]) -> None:
    image = Image.fromarray(np.linspace(0, 1 if kind is np.float32 else 4095, 100).reshape(10, 10).astype(kind))
    with pytest.raises(UnreadableImage, match=r"^its pixels have 32 bits, .* save it with 8"):
        middle(encoded(image, "TIFF"), 8)


def test_a_truncated_image_counts_as_unreadable(photograph: Image.Image) -> None:
    whole = encoded(photograph, quality=90)
    png = encoded(photograph.resize((64, 48)), "PNG")
    huge = encoded(Image.new("1", (40000, 10000)), "PNG")
    for content in (
        b"",
        b"\xff\xd8\xff",
        b"not an image",
        whole[:2000],
        whole[: len(whole) // 2],
        png[:200],
        png[:-30],
        huge,
    ):
        with pytest.raises(UnreadableImage, match=r".+") as caught:
            crop(content, box(0, 0, 10, 10), 8)
        assert "object at 0x" not in str(caught.value)


def test_a_jpeg_with_a_harmless_fault_is_readable(photograph: Image.Image) -> None:
    """libjpeg only warns about bytes after the end and unknown markers, and people train on such
    files.
    """
    whole = encoded(photograph.resize((64, 48)), quality=90)
    pixels = crop(whole, box(0, 0, 48, 64), 32)
    assert torch.equal(crop(whole + b"trailing bytes", box(0, 0, 48, 64), 32), pixels)


def giants() -> dict[str, bytes]:
    """Return images of a few hundred bytes whose headers claim more pixels than allowed."""
    small, wide, high = Image.new("RGB", (64, 64)), 16_383, 16_000

    def patched(content: bytes, where: int, value: bytes) -> bytes:
        return content[:where] + value + content[where + len(value) :]

    jpeg, bmp, gif = encoded(small), encoded(small, "BMP"), encoded(small, "GIF")
    lossy, lossless = encoded(small, "WEBP"), encoded(small, "WEBP", lossless=True)
    header = b"IHDR" + struct.pack(">II", wide, high) + b"\x08\x02\x00\x00\x00"
    png = patched(encoded(small, "PNG"), 12, header + struct.pack(">I", zlib.crc32(header)))
    extended = (
        b"VP8X\x0a\x00\x00\x00\x00\x00\x00\x00" + (wide - 1).to_bytes(3, "little") + (high - 1).to_bytes(3, "little")
    )
    return {
        "JPEG": patched(jpeg, jpeg.index(b"\xff\xc0") + 5, struct.pack(">HH", high, wide)),
        "PNG": png,
        "WebP, lossy": patched(lossy, 26, struct.pack("<HH", wide, high)),
        "WebP, lossless": patched(lossless, 21, ((high - 1) << 14 | (wide - 1)).to_bytes(4, "little")),
        "WebP, lossless, without pixels": b"RIFF"
        + struct.pack("<I", 18)
        + b"WEBPVP8L"
        + struct.pack("<I", 5)
        + b"\x2f"
        + ((high - 1) << 14 | (wide - 1)).to_bytes(4, "little")
        + b"\0",
        "WebP, extended": b"RIFF" + struct.pack("<I", len(extended + lossy) - 8) + b"WEBP" + extended + lossy[12:],
        "BMP": patched(bmp, 18, struct.pack("<ii", wide, high)),
        "GIF": patched(gif, 6, struct.pack("<HH", wide, high)),
        "TIFF": tiff(wide, high),
        "TIFF, tiles": tiff(64, 64, tile=(wide + 1, high)),
        "PPM": f"P6 {wide} {high} 255\n".encode(),
    }


def tiff(width: int, height: int, tile: tuple[int, int] | None = None) -> bytes:
    where = {322: tile[0], 323: tile[1], 324: 8, 325: 8} if tile else {273: 8, 278: height, 279: 8}
    tags = {256: width, 257: height, 258: 8, 259: 8, 262: 1, 277: 1, **where}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted(tags.items()))
    return b"II*\x00" + struct.pack("<I", 16) + zlib.compress(b"") + struct.pack("<H", len(tags)) + entries + b"\0" * 4


def refuse_to_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    def called(*_: Any, **__: Any) -> None:
        raise AssertionError("a decoder was called")

    monkeypatch.setattr(simplejpeg, "decode_jpeg", called)
    monkeypatch.setattr(ImageFile.ImageFile, "load", called)
    monkeypatch.setattr(WebPImagePlugin._webp, "WebPAnimDecoder", called)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)  # a script may remove Pillow's own limit


@pytest.mark.parametrize("kind", giants())
def test_an_image_with_a_giant_header_is_refused_before_a_decoder_sees_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = giants()[kind]
    refuse_to_decode(monkeypatch)
    acts: list[Callable[[], Any]] = [
        lambda: crop(content, box(0, 0, 8, 8), 8),
        lambda: middle(content, 8),
        lambda: decode.size_of(content),
    ]
    assert len(content) < 20_000
    for act in acts:
        with pytest.raises(
            UnreadableImage, match=r"^it has 1638[34] x 16000 pixels, more than 178,956,970; scale it down$"
        ):
            act()


def test_an_image_with_the_maximum_number_of_pixels_reaches_its_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    content = encoded(Image.new("RGB", (64, 64)))
    monkeypatch.setattr(decode, "MOST_PIXELS", 64 * 64)
    assert middle(content, 8).shape == (3, 8, 8)
    monkeypatch.setattr(decode, "MOST_PIXELS", 64 * 64 - 1)
    refuse_to_decode(monkeypatch)
    with pytest.raises(UnreadableImage, match=r"^it has 64 x 64 pixels, more than 4,095; scale it down$"):
        middle(content, 8)


def test_an_image_one_pixel_high_is_not_scaled_to_billions_of_pixels() -> None:
    content = encoded(Image.new("L", (65_000, 1)), "PNG")
    with pytest.raises(UnreadableImage, match=r"^it has 16640000 x 256 pixels, more than 178,956,970"):
        middle(content, 224)


def test_a_jpeg_with_thousands_of_scans_is_refused_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan may have only a few bytes, but each costs a pass over all pixels."""
    whole = encoded(Image.new("RGB", (64, 64)), progressive=True)
    scan = whole[whole.index(b"\xff\xda") : -2]
    content = whole[:-2] + scan * 600 + whole[-2:]
    refuse_to_decode(monkeypatch)
    for act in (middle, lambda content, _: decode.size_of(content)):
        with pytest.raises(UnreadableImage, match=r"^it has \d+ scans, more than 500; save it as a baseline JPEG$"):
            act(content, 8)


@pytest.mark.parametrize("kind", ["EPS", "ICO", "PCX", "TGA", "SGI", "PDF"])
def test_undocumented_formats_are_not_opened(kind: str) -> None:
    """Pillow has about forty decoders and chooses one by a file's bytes. Its EPS decoder runs
    Ghostscript.
    """
    with pytest.raises(UnreadableImage, match=r"^not a known image format \(JPEG, PNG, WEBP, BMP, GIF, TIFF, PPM\)$"):
        middle(encoded(Image.new("RGB", (64, 64)), kind), 8)

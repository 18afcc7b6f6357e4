"""Tar shards are packed, indexed, and read by byte range from a folder and a web server. Training
from them equals training from the image folder.
"""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import tarfile
import threading
import tracemalloc
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from datasets import write_image_folder
from ddpjob_pod import file_lock
from ddpjob_trainer import __main__, config
from ddpjob_trainer.commands import pack_shards
from ddpjob_trainer.data import decode, imagefolder, shard_index
from ddpjob_trainer.data.catalog import open_data
from ddpjob_trainer.data.dataset import DataSet
from ddpjob_trainer.errors import ConfigError, DataError
from PIL import Image
from ranks import final_losses, good

EXAMPLES = Path(__file__).parents[3] / "examples"
CONFIG = ["data.image_size=16", "data.workers=0", "data.batch=6"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "images"
    root.mkdir()
    write_image_folder(root, 8)
    return root


@pytest.fixture
def packed(folder: Path, tmp_path: Path) -> Path:
    out = tmp_path / "packed"
    pack_shards.pack(folder, out, 20_000)
    return out


def opened(*arguments: str) -> DataSet:
    return open_data(config.load(None, ["data.name=shards", *CONFIG, *arguments]).data)


def images(data: DataSet, count: int) -> dict[bytes, int]:
    """Map the bytes of each test image to its label. Test images are not augmented."""
    (batch,) = data.test_batches([list(range(count))])
    return {image.numpy().tobytes(): label for image, label in zip(batch.images, batch.labels.tolist(), strict=True)}


def test_packed_shards_hold_every_image_of_the_folder_with_its_label(folder: Path, packed: Path) -> None:
    data = opened(f"data.dir={packed}")
    plain = open_data(config.load(None, ["data.name=imagefolder", *CONFIG, f"data.dir={folder}"]).data)
    assert (data.train_size, data.test_size, data.classes) == (16, 16, 2)
    found = images(data, 16)
    assert found == images(plain, 16) and len(found) == 16
    assert (packed / "classes.txt").read_text() == "n01440764\nn01443537\n"


def test_shards_keep_their_size_and_are_plain_webdataset_tars(packed: Path) -> None:
    shards = sorted((packed / "train").glob("*.tar"))
    assert len(shards) > 2
    labels: list[int] = []
    for shard in shards:
        assert shard.stat().st_size <= 20_000 + tarfile.RECORDSIZE
        with tarfile.open(shard) as archive:
            names = archive.getnames()
            assert [name.split(".")[1] for name in names] == ["jpeg", "cls"] * (len(names) // 2)
            assert all(
                first.split(".")[0] == second.split(".")[0]
                for first, second in zip(names[::2], names[1::2], strict=True)
            )
            labels += [int(archive.extractfile(name).read()) for name in names[1::2]]  # type: ignore[union-attr]
    assert sorted(labels) == [0] * 8 + [1] * 8 and labels != sorted(labels), "mixed"


def test_large_images_are_scaled_and_the_others_are_packed_unchanged(folder: Path, tmp_path: Path) -> None:
    """The images are 50 pixels wide and 40, 43, ... 61 pixels high, and one of them is broken. The
    bytes are the same each time.
    """
    broken = folder / "train" / "n01440764" / "n01440764_7.JPEG"
    broken.write_bytes(broken.read_bytes()[:400])
    originals = {path.read_bytes() for path in (folder / "train").rglob("*.JPEG")}
    outs = [tmp_path / "first", tmp_path / "second"]
    for out in outs:
        assert pack_shards.main([str(folder), str(out), "--size", "20kB", "--max-side", "52"]) == 0
    kept, sides = set(), list[int]()
    for shard in sorted((outs[0] / "train").glob("*.tar")):
        assert shard.read_bytes() == (outs[1] / "train" / shard.name).read_bytes()
        with tarfile.open(shard) as archive:
            for member in archive:
                content = archive.extractfile(member).read()  # type: ignore[union-attr]
                if member.name.endswith(".jpeg"):
                    kept.add(content)
                elif member.name.endswith(".jpg"):
                    sides.append(max(decode.size_of(content)))
    assert sides == [52] * 5 and len(kept) == 11 and kept <= originals and broken.read_bytes() in kept
    data = opened(f"data.dir={outs[0]}", "data.corrupt_limit=0.5")
    assert (data.train_size, data.test_size, data.classes) == (16, 16, 2)
    (batch,) = data.train_batches([list(range(16))], 0)
    assert batch.unreadable == 1 and sorted(batch.labels.tolist()) == [-100, *[0] * 7, *[1] * 8]


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_scaled_image_looks_like_the_original(kind: str) -> None:
    from sklearn.datasets import load_sample_image
    from torchvision.transforms import v2

    pixels = load_sample_image("china.jpg")
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **({"quality": 95} if kind == "JPEG" else {}))
    content = buffer.getvalue()
    found, small = (decode.shrink(content, 320, quality) for quality in (90, 50))
    assert found is not None and small is not None and len(small) < len(found) < len(content)
    wanted = v2.Resize((214, 320), antialias=True)(torch.from_numpy(pixels.copy()).permute(2, 0, 1))
    scaled = torch.from_numpy(np.array(Image.open(io.BytesIO(found)))).permute(2, 0, 1)
    assert scaled.shape == wanted.shape and (scaled.float() - wanted.float()).abs().mean() < 4
    assert decode.shrink(content, 640, 90) is None and decode.shrink(found, 320, 90) is None


def test_an_index_built_from_the_tars_equals_the_one_that_packing_wrote(packed: Path) -> None:
    written = {key: value.tolist() for key, value in np.load(packed / "train" / "index.npz").items()}
    (packed / "train" / "index.npz").unlink()
    opened(f"data.dir={packed}")
    assert {key: value.tolist() for key, value in np.load(packed / "train" / "index.npz").items()} == written


def test_an_index_of_different_shards_is_rebuilt(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scans: list[str] = []
    scan = shard_index._scan
    monkeypatch.setattr(shard_index, "_scan", lambda url, *rest: scans.append(url) or scan(url, *rest))
    opened(f"data.dir={packed}")
    assert scans == []
    removed = sorted((packed / "train").glob("*.tar"))[-1]
    removed.unlink()
    assert opened(f"data.dir={packed}").train_size < 16 and scans == [str(packed / "train")]
    opened(f"data.dir={packed}")
    assert len(scans) == 1, "kept"


def relabelled(shard: Path) -> None:
    """Rewrite the tar in place, with the same length and the labels 0 and 1 exchanged."""
    content = io.BytesIO()
    with tarfile.open(shard) as old, tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as new:
        for member in old:
            data = old.extractfile(member).read()  # type: ignore[union-attr]
            new.addfile(member, io.BytesIO(b"%d" % (1 - int(data)) if member.name.endswith(".cls") else data))
    length, before = shard.stat().st_size, shard.stat().st_mtime_ns
    shard.write_bytes(content.getvalue())
    os.utime(shard, ns=(before + 1_000_000, before + 1_000_000))
    assert shard.stat().st_size == length


@pytest.mark.parametrize("kept", ["beside", "elsewhere"])
def test_labels_that_were_changed_in_place_are_read_again(kept: str, packed: Path, tmp_path: Path) -> None:
    more = [f"data.index={tmp_path / 'index'}"] if kept == "elsewhere" else []
    if kept == "elsewhere":
        for part in ("train", "val"):
            (packed / part / "index.npz").unlink()
    before = images(opened(f"data.dir={packed}", *more), 16)
    for shard in (packed / "val").glob("*.tar"):
        relabelled(shard)
    assert images(opened(f"data.dir={packed}", *more), 16) == {image: 1 - label for image, label in before.items()}


def test_a_copied_index_is_used_unless_the_store_reports_a_different_stamp() -> None:
    columns = {name: np.zeros(1, dtype=np.int64) for name in ("lengths", "shard", "offsets", "sizes", "labels")}

    def index(stamp: str) -> shard_index.Index:
        return shard_index.Index(url="s3://b", shards=["s3://b/a.tar"], stamps=np.array([stamp]), **columns)  # type: ignore[arg-type]

    found = shard_index._Found(["s3://b/a.tar"], columns["lengths"], np.array([shard_index.stamp_of({"ETag": "x"})]))
    assert [shard_index._is_of(index(stamp), found, copied=True) for stamp in ("mtime 1", "-", "etag x", "etag y")] == [
        True,
        True,
        True,
        False,
    ]
    assert not shard_index._is_of(index("mtime 1"), found), "only this machine's cache is used"


def test_training_from_shards_equals_training_from_the_folder_in_the_same_order(packed: Path, tmp_path: Path) -> None:
    """This also holds on 2 ranks and with workers."""
    arguments = [
        "data.name=shards",
        *CONFIG,
        f"data.dir={packed}",
        "model.width=4",
        "train.epochs=2",
        "train.log_every=1",
    ]
    for world, workers in ((1, 0), (2, 0), (1, 2)):
        good(world, [*arguments, f"data.workers={workers}", f"checkpoint.dir={tmp_path / f'{world}-{workers}'}"])
    one = final_losses(tmp_path / "1-0" / "run")
    np.testing.assert_allclose(final_losses(tmp_path / "2-0" / "run"), one, rtol=1e-5)
    assert final_losses(tmp_path / "1-2" / "run") == one


class Ranges(SimpleHTTPRequestHandler):
    """A web server that supports byte ranges, as object stores do. Its first `faults` responses are
    503.
    """

    faults = 0
    requests: list[str]

    def do_GET(self) -> None:
        """Send a file, or a range of its bytes."""
        wanted = self.headers.get("Range")
        path = Path(self.translate_path(self.path))
        if wanted is None or not path.is_file():
            super().do_GET()
            return
        self.requests.append(wanted)
        if type(self).faults > 0:
            type(self).faults -= 1
            self.send_error(503)
            return
        first, last = (int(part) for part in wanted.removeprefix("bytes=").split("-"))
        content = path.read_bytes()[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Range", f"bytes {first}-{last}/{path.stat().st_size}")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@pytest.fixture
def server(packed: Path) -> Iterator[str]:
    pytest.importorskip("aiohttp", reason="fsspec reads https:// by aiohttp")
    Ranges.requests, Ranges.faults = [], 0
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Ranges, directory=str(packed))) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("workers", [0, 2])
def test_images_read_from_a_web_server_by_byte_range_are_the_same(workers: int, packed: Path, server: str) -> None:
    data, local = opened(f"data.url={server}", f"data.workers={workers}"), opened(f"data.dir={packed}")
    Ranges.requests.clear()
    assert images(data, 16) == images(local, 16)
    assert len(Ranges.requests) == 16, "each image is read by one range request, and nothing else is read"
    for mine, theirs in zip(data.train_batches([[3, 9], [4]], 1), local.train_batches([[3, 9], [4]], 1), strict=True):
        assert torch.equal(mine.images, theirs.images) and torch.equal(mine.labels, theirs.labels)


def test_a_server_without_an_index_is_scanned_and_the_index_kept(packed: Path, server: str, tmp_path: Path) -> None:
    for part in ("train", "val"):
        (packed / part / "index.npz").unlink()
    kept = tmp_path / "kept"
    data = opened(f"data.url={server}", f"data.index={kept}")
    assert images(data, 16) == images(opened(f"data.dir={packed}"), 16)
    assert len(list(kept.glob("*-index.npz"))) == 2
    for part in ("train", "val"):
        (packed / part / "index.npz").unlink()
    Ranges.requests.clear()
    opened(f"data.url={server}", f"data.index={kept}")
    assert not Ranges.requests, "the index is read from the folder"


def test_a_failing_server_is_retried_and_is_never_reported_as_a_corrupt_image(
    server: str,
) -> None:
    data = opened(f"data.url={server}")
    Ranges.faults = 2
    (batch,) = data.test_batches([[0, 1]])
    assert batch.unreadable == 0
    Ranges.faults = 1000
    with pytest.raises(DataError, match=r"shard-0.* cannot be read at byte \d+, even after 3 attempts: .*503"):
        list(data.test_batches([[0, 1]]))


def test_a_damaged_image_in_a_shard_is_reported_with_its_position(
    packed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = opened(f"data.dir={packed}")
    offset = int(np.load(packed / "val" / "index.npz")["offsets"][0])
    shard = packed / "val" / "shard-000000.tar"
    with shard.open("r+b") as file:
        file.seek(offset)
        file.write(b"\0" * 100)
    (batch,) = data.test_batches([[0, 1]])
    assert batch.unreadable == 1 and f"image at byte {offset} of {shard} cannot be read" in capsys.readouterr().err


def write_shard(path: Path, members: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def a_jpeg(folder: Path) -> bytes:
    return next((folder / "train").rglob("*.JPEG")).read_bytes()


def test_shards_of_other_tools_are_read(folder: Path, tmp_path: Path) -> None:
    """Other tools write long names (pax headers), folders in names, extra members, and .cls before
    its image.
    """
    jpeg, long = a_jpeg(folder), "a-very-long-key" * 12
    members = {"d/one.two.cls": b"1\n", "d/one.cls": b" 1\n", "d/one.jpg": jpeg, "d/one.json": b"{}"}
    members |= {f"{long}.JPG": jpeg, f"{long}.cls": b"0"}
    del members["d/one.two.cls"]
    for part in ("train", "val"):
        write_shard(tmp_path / "other" / part / "x-0.tar", members)
    data = opened(f"data.dir={tmp_path / 'other'}")
    (batch,) = data.test_batches([[0, 1]])
    assert (data.train_size, data.classes, batch.unreadable, sorted(batch.labels.tolist())) == (2, 2, 0, [0, 1])


def test_invalid_shards_are_reported_with_the_remedy(folder: Path, tmp_path: Path) -> None:
    jpeg, root = a_jpeg(folder), tmp_path / "bad"

    def fails(message: str, members: dict[str, bytes], classes: str | None = None) -> None:
        for part in ("train", "val"):
            write_shard(root / part / "s.tar", members)
            (root / part / "index.npz").unlink(missing_ok=True)
        if classes is not None:
            (root / "classes.txt").write_text(classes)
        with pytest.raises(DataError, match=message):
            opened(f"data.dir={root}")

    fails(
        r"s.tar: /?a has no .cls file with its class number \(images without a .cls file: 1\): .*ddpjob_trainer shards",
        {"a.jpg": jpeg},
    )
    fails(r"s.tar: a.cls contains b'cat' instead of a class number", {"a.jpg": jpeg, "a.cls": b"cat"})
    fails(
        r"train has label -1, outside 0\.\.0 \(in 1 images, first at byte \d+ of .*s.tar\)",
        {"a.jpg": jpeg, "a.cls": b"-1"},
        "cat\n",
    )
    fails(r"train has label 7, outside 0\.\.1 .*classes.txt", {"a.jpg": jpeg, "a.cls": b"7"}, "cat\ndog\n")
    fails(r"has no images \(jpg", {"a.txt": b""})
    (root / "train" / "s.tar").write_bytes(b"no tar" * 1000)
    with pytest.raises(DataError, match=r"s.tar cannot be read"):
        opened(f"data.dir={root}")
    (root / "train" / "s.tar").unlink()
    with pytest.raises(DataError, match=r"has no .tar files: .*ddpjob_trainer shards"):
        opened(f"data.dir={root}")
    with pytest.raises(DataError, match=r"needs data.dir .*or set data.url"):
        opened()
    with pytest.raises(DataError, match=r"cannot be opened .*use a path, or an s3://"):
        opened("data.url=nonsense://x/y")
    with pytest.raises(DataError, match=r"cannot be listed .*ddpjob_trainer shards"):
        opened("data.url=http://127.0.0.1:9/x", f"data.index={tmp_path}")
    with pytest.raises(
        DataError, match=r"http://127.0.0.1:99999/x cannot be read .*data.url is correct"
    ):  # not an OSError
        opened("data.url=http://127.0.0.1:99999/x", f"data.index={tmp_path}")


@pytest.fixture
def shard(folder: Path, tmp_path: Path) -> Path:
    """Pack a shard of five images."""
    path = tmp_path / "five" / "train" / "s.tar"
    jpeg = a_jpeg(folder)
    write_shard(path, {f"{n}.{kind}": jpeg if kind == "jpg" else b"0" for n in range(5) for kind in ("jpg", "cls")})
    write_shard(path.parents[1] / "val" / "s.tar", {"0.jpg": jpeg, "0.cls": b"0"})
    return path


def test_a_shard_that_tarfile_would_read_only_partly_is_refused(shard: Path) -> None:
    """A shard may be truncated between two members or within a header, or contain several
    concatenated tars.
    """
    with tarfile.open(shard) as archive:
        third = archive.getmembers()[4].offset
    whole = shard.read_bytes()
    for cut in (third, third + 100):
        shard.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"s.tar is truncated \(.*\); copy or write it again"):
            opened(f"data.dir={shard.parents[1]}")
    shard.write_bytes(whole * 2)
    with pytest.raises(
        DataError, match=r"s.tar continues after its end-of-archive marker, .*put each into a separate file"
    ):
        opened(f"data.dir={shard.parents[1]}")
    shard.write_bytes(whole)
    assert opened(f"data.dir={shard.parents[1]}").train_size == 5


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (
            {"b.gif": b"GIF", "b.cls": b"0"},
            r"s.tar: /?b.cls has no image with the same key \(files without an image: 1; images are jpg, ",
        ),
        (
            {"b.v1.jpg": b"", "b.v1.cls": b"0"},
            r"s.tar: b.v1.cls has no image with the same key \(such files: 1\), because .* first dot",
        ),
    ],
)
def test_a_labelled_sample_whose_image_is_not_found_is_refused(
    members: dict[str, bytes], message: str, folder: Path, tmp_path: Path
) -> None:
    jpeg = a_jpeg(folder)
    for part in ("train", "val"):
        write_shard(tmp_path / part / "s.tar", {"a.jpg": jpeg, "a.cls": b"0"} | members)
    with pytest.raises(DataError, match=message):
        opened(f"data.dir={tmp_path}")


def test_the_list_of_classes_may_have_a_byte_order_mark_and_windows_line_ends(shard: Path) -> None:
    names = shard.parents[1] / "classes.txt"

    def read(content: bytes) -> list[str] | None:
        names.write_bytes(content)
        return opened(f"data.dir={names.parent}").class_names

    assert read(b"\xef\xbb\xbfcat\r\ndog\r\n\r\n") == ["cat", "dog"]
    assert read("a b\nc\u2028d\ne\x85f\n".encode()) == ["a b", "c\u2028d", "e\x85f"]
    assert read(b"\xfc") == ["\udcfc"], "the name of a folder need not be UTF-8"
    with pytest.raises(DataError, match=r"classes.txt: line 2 is empty"):
        read(b"cat\n\ndog\n")


def test_packing_keeps_the_names_of_classes(folder: Path, tmp_path: Path) -> None:
    first = sorted(path.name for path in (folder / "train").iterdir())[0]
    odd = os.fsdecode(b"z\xff\xe2\x80\xa8")
    for part in ("train", "val"):
        (folder / part / first).rename(folder / part / odd)
    pack_shards.pack(folder, tmp_path / "out", 10**6)
    assert opened(f"data.dir={tmp_path / 'out'}").class_names == sorted(p.name for p in (folder / "train").iterdir())
    for part in ("train", "val"):
        (folder / part / odd).rename(folder / part / "a\nb")
    with pytest.raises(DataError, match=r"class folder 'a\\nb': .*rename the folder"):
        pack_shards.pack(folder, tmp_path / "other", 10**6)
    assert not (tmp_path / "other").exists()


def test_a_damaged_index_is_reported(packed: Path) -> None:
    index = packed / "train" / "index.npz"
    index.write_bytes(index.read_bytes()[:-40])
    with pytest.raises(DataError, match=rf"damaged .*remove {index}"):
        opened(f"data.dir={packed}")


def test_the_index_is_built_on_a_file_system_without_locks(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lustre mounted without the flock option does not support locks. Regression: the message
    blamed permissions.
    """

    def refused(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(file_lock.fcntl, "flock", refused)
    (packed / "train" / "index.npz").unlink()
    assert opened(f"data.dir={packed}").train_size == 16
    assert (packed / "train" / "index.npz").exists()


def test_an_index_that_cannot_be_kept_is_reported(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shard_index, "save", full)
    index = packed / "train" / "index.npz"
    index.unlink()
    with pytest.raises(DataError, match=rf"cannot be written to {index} \(No space left on device\); .* data.index"):
        opened(f"data.dir={packed}")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"sha'])
def test_a_damaged_packing_plan_is_reported(text: str, folder: Path, packed: Path) -> None:
    (packed / "train" / "plan.json").write_text(text)
    with pytest.raises(DataError, match=r"plan.json is damaged .*; remove .*train, or choose a different folder"):
        pack_shards.pack(folder, packed, 20_000)


def test_packing_continues_where_it_was_interrupted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    pack_shards.pack(folder, whole, 20_000)
    write, written = pack_shards._write, list[Path]()

    def dies_at_the_third(path: Path, shard: list[pack_shards.PackedImage], scaling: Any) -> Path:
        if len(written) == 2:
            (path.parent / f".{path.name}.1.tmp").write_bytes(b"half")
            raise KeyboardInterrupt
        written.append(path)
        return write(path, shard, scaling)

    monkeypatch.setattr(pack_shards, "_write", dies_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        pack_shards.pack(folder, out, 20_000)
    monkeypatch.setattr(pack_shards, "_write", lambda path, *rest: written.append(path) or write(path, *rest))
    before = {path: path.stat().st_ino for path in out.rglob("*.tar")}
    assert len(before) == 2
    pack_shards.pack(folder, out, 20_000)
    assert all(path.stat().st_ino == inode for path, inode in before.items()) and len(set(written)) == len(written), (
        "none twice"
    )
    for path in whole.rglob("*.tar"):
        assert (out / path.relative_to(whole)).read_bytes() == path.read_bytes()
    assert not list(out.rglob("*.tmp")), "no incomplete file is left"


def test_packing_refuses_a_folder_with_different_shards_and_invalid_sizes(folder: Path, packed: Path) -> None:
    with pytest.raises(DataError, match=r"contains shards made from other images, or with a different --size, --max-"):
        pack_shards.pack(folder, packed, 50_000)
    with pytest.raises(DataError, match=r"or --quality; remove this folder, or choose a different one"):
        pack_shards.pack(folder, packed, 20_000, pack_shards.Scaling(50, 90))
    for more, message in (
        (["--quality", "90"], r"--quality=90: applies only to scaled images; set --max-side=500"),
        (["--max-side", "0"], r"--max-side=0: must be at least 1"),
        (["--max-side", "500", "--quality", "101"], r"--quality=101: must be from 1 to 100; 90 is usual"),
    ):
        with pytest.raises(ConfigError, match=message):
            pack_shards.main([str(folder), str(packed), *more])
    with pytest.raises(ConfigError, match=r"--size: 'big' is not a size, such as 256MB"):
        pack_shards.main([str(folder), str(packed), "--size", "big"])
    assert [pack_shards._bytes(text) for text in ("256MB", "1.5 GiB", "4096", "2k")] == [
        256 * 10**6,
        3 * 2**29,
        4096,
        2000,
    ]


def test_the_command_packs_shards(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.run(["shards", str(folder), str(tmp_path / "out"), "--size", "20kB"]) == 0
    assert "16 images in" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "train" / "plan.json").read_text())
    with pytest.raises(DataError, match=r"does not exist .*train/CLASS/"):
        __main__.run(["shards", str(tmp_path / "nowhere"), str(tmp_path / "out2")])


def test_packing_into_a_folder_that_is_not_writable_is_reported(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(
        DataError, match=r"out/train: Not a directory; free some space or repair the volume, then run the command again"
    ):
        pack_shards.pack(folder, tmp_path / "out", 20_000)


def test_opening_shards_raises_the_limit_of_open_files(packed: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    try:
        opened(f"data.dir={packed}")
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_example_with_data_in_a_bucket_uses_shards(folder: Path, tmp_path: Path) -> None:
    """ImageNet as single files has 1.3 million objects, more than a job may fetch."""
    pack_shards.main([str(folder), str(tmp_path / "out")])
    _, name, *keys = yaml.safe_load((EXAMPLES / "data-bucket.yaml").read_text())["spec"]["args"]
    settings = config.load(name, [*keys, *CONFIG, f"data.dir={tmp_path / 'out'}"])
    assert open_data(settings.data, torch.device("cpu")).train_size == 16


def index_of(packed: Path, **changes: Any) -> dict[str, Any]:
    columns: dict[str, Any] = dict(np.load(packed / "train" / "index.npz"))
    return columns | {key: change(columns[key]) for key, change in changes.items()}


def empty_array_of(shape: tuple[int, ...], kind: str) -> bytes:
    """Return a .npy file that claims a shape but has no content."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": kind, "fortran_order": False, "shape": shape})
    return stream.getvalue()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"names": lambda names: np.array([f"../other/{name}" for name in names])}, "a shard's name contains a slash"),
        ({"shard": lambda shard: shard + 100}, "an image is not in any shard"),
        ({"shard": lambda shard: -shard - 1}, "an image is not in any shard"),
        ({"offsets": lambda offsets: offsets + 2**62}, "an image ends beyond its shard"),
        ({"sizes": lambda sizes: sizes + 2**30}, "an image ends beyond its shard"),
        ({"sizes": lambda sizes: -sizes}, "an image ends beyond its shard"),
        ({"labels": lambda labels: labels[1:]}, "its columns differ in length"),
        ({"labels": lambda labels: labels.astype(float)}, "has neither integers nor strings"),
        ({"stamps": lambda stamps: stamps[1:]}, "its columns differ in length"),
    ],
)
def test_an_index_that_points_outside_its_shards_is_refused(changes: dict[str, Any], reason: str, packed: Path) -> None:
    columns = index_of(packed, **changes)
    np.savez(packed / "train" / "index.npz", **columns)
    with pytest.raises(DataError, match=rf"the index of \S+ is damaged \({reason}|is damaged \(an array {reason}"):
        opened(f"data.dir={packed}")


def test_an_index_is_neither_decompressed_nor_trusted_about_its_size(packed: Path) -> None:
    """Each of these files is small, but numpy.load would allocate gigabytes for it."""
    path = packed / "train" / "index.npz"
    np.savez_compressed(path, **index_of(packed), more=np.zeros(10_000_000, np.int64))
    with pytest.raises(DataError, match="or they are compressed"):
        opened(f"data.dir={packed}")
    for content in (empty_array_of((1 << 40,), "<i8"), empty_array_of((1 << 60,), "|S0"), empty_array_of((9,), "|O")):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("names.npy", content)
        tracemalloc.start()
        with pytest.raises(DataError, match=rf"the index of {packed}/train is damaged .*remove {path}"):
            opened(f"data.dir={packed}")
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
        tracemalloc.stop()


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE])
def test_an_extended_header_of_a_tar_is_not_read_into_memory(kind: bytes, folder: Path, tmp_path: Path) -> None:
    member = tarfile.TarInfo("long")
    member.type, member.size = kind, 1 << 32
    for part in ("train", "val"):
        (tmp_path / "t" / part).mkdir(parents=True)
        shard = tmp_path / "t" / part / "0.tar"
        shard.write_bytes(member.tobuf(tarfile.GNU_FORMAT))
        os.truncate(shard, 1 << 33)
    with pytest.raises(
        DataError, match=r"0.tar cannot be read \(an extended header has 4,294,967,296 bytes; the limit is"
    ):
        opened(f"data.dir={tmp_path / 't'}")


def test_a_tar_with_an_endless_chain_of_headers_is_refused(tmp_path: Path) -> None:
    member = tarfile.TarInfo("long")
    member.type, member.size = tarfile.GNUTYPE_LONGNAME, 0
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "0.tar").write_bytes(member.tobuf(tarfile.GNU_FORMAT) * 5_000)
    with pytest.raises(DataError, match=r"0.tar cannot be read \(maximum recursion depth exceeded"):
        opened(f"data.dir={tmp_path}")


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        (b"9" * 5_000, "more than 10,000,000"),
        (b"99999999999", "has class 99999999999, more than 10,000,000"),
        (b"-99999999999", "has class -99999999999, more than 10,000,000"),
    ],
)
def test_a_huge_label_does_not_determine_the_size_of_the_model(label: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    with tarfile.open(tmp_path / "train" / "0.tar", "w") as archive:
        for name, content in (("a.jpg", b"x"), ("a.cls", label)):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    with pytest.raises(DataError, match=rf"0.tar: a.cls .*{reason}"):
        opened(f"data.dir={tmp_path}")


def test_a_list_of_classes_above_the_size_limit_is_not_read(packed: Path) -> None:
    os.truncate(packed / "classes.txt", 1 << 40)
    with pytest.raises(DataError, match=r"classes.txt has more than 67,108,864 bytes"):
        opened(f"data.dir={packed}")


def test_an_image_file_in_a_folder_has_a_bounded_size(folder: Path) -> None:
    data = imagefolder.Folder(folder / "train")
    paths = [Path(data.name(number)) for number in range(3)]
    os.truncate(paths[0], 1 << 40)  # a sparse file, which takes no space
    for path in paths[1:]:
        path.unlink()
    os.mkfifo(paths[1])
    paths[2].symlink_to("/dev/zero")
    reasons = [str(getattr(found, "strerror", None)) for found in data.read([0, 1, 2])]
    assert reasons[0] == "it has 1,099,511,627,776 bytes; the limit is 1,073,741,820"
    assert reasons[1:] == ["it is not a regular file"] * 2

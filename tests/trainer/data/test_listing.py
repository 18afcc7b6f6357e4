"""A folder of images is listed once per node, and again when any of its folders has changed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from datasets import write_image_folder
from ddpjob_trainer.data import listing as module
from ddpjob_trainer.data.imagefolder import Folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Create class folders, one with a subfolder, all last changed an hour ago."""
    write_image_folder(tmp_path / "data", 3)
    folder = tmp_path / "data" / "train"
    first = sorted(folder.iterdir())[0]
    (first / "more").mkdir()
    os.link(sorted(first.glob("*.JPEG"))[0], first / "more" / "z.jpg")
    for path in [folder, *folder.rglob("*")]:
        settle(path)
    return folder


def settle(path: Path) -> None:
    """Set the modification times to an hour ago."""
    before = time.time() - 3600
    os.utime(path, (before, before))


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the folders that are listed."""
    found: list[str] = []
    scan = os.scandir

    def noted(path: str | Path) -> object:
        found.append(str(path))
        return scan(path)

    monkeypatch.setattr(module.os, "scandir", noted)
    return found


def names(root: Path, kept: Path) -> list[str]:
    folder = Folder(root, kept)
    return [folder.name(number) for number in range(len(folder.labels))]


def in_order(root: Path) -> list[str]:
    """Return the files, folder by folder, in the order of torchvision's ImageFolder."""
    return [
        str(path) for path in sorted(root.rglob("*"), key=lambda path: (str(path.parent), path.name)) if path.is_file()
    ]


def test_the_second_start_lists_no_folders(root: Path, tmp_path: Path, scans: list[str]) -> None:
    first = names(root, tmp_path / "kept")
    assert first == in_order(root) and scans
    labels = Folder(root, tmp_path / "kept").labels.tolist()
    assert labels == [sorted(root.iterdir()).index(root / Path(name).relative_to(root).parts[0]) for name in first]
    scans.clear()
    assert names(root, tmp_path / "kept") == first and not scans


def added(root: Path) -> None:
    one = next(root.rglob("*.JPEG"))
    os.link(one, one.parent / "new.jpeg")


def removed(root: Path) -> None:
    next(root.rglob("*.JPEG")).unlink()


def renamed(root: Path) -> None:
    one = next(root.rglob("z.jpg"))
    one.rename(one.with_name("y.jpg"))


def added_by_tar(root: Path) -> None:
    """Add files as tar does, which sets the folders' times to the times in the archive."""
    one = next(root.rglob("*.JPEG"))
    before = one.parent.stat()
    os.link(one, one.parent / "new.jpeg")
    os.utime(one.parent, ns=(before.st_atime_ns, before.st_mtime_ns))


def a_class_added(root: Path) -> None:
    (root / "zebra").mkdir()
    os.link(next(root.rglob("*.JPEG")), root / "zebra" / "1.jpg")


def a_class_moved_away(root: Path) -> None:
    one = sorted(root.iterdir())[-1]
    one.rename(root.parent / "elsewhere")


@pytest.mark.parametrize("change", [added, added_by_tar, removed, renamed, a_class_added, a_class_moved_away])
def test_a_changed_folder_of_images_is_listed_again(change, root: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    before = names(root, tmp_path / "kept")
    change(root)
    after = names(root, tmp_path / "kept")
    assert after == in_order(root) != before


def test_a_listing_of_recently_changed_files_is_not_kept(root: Path, tmp_path: Path, scans: list[str]) -> None:
    """Another change within the clock's resolution may leave the modification time unchanged."""
    added(root)
    names(root, tmp_path / "kept")
    scans.clear()
    names(root, tmp_path / "kept")
    assert scans


def test_folders_without_modification_times_are_listed_at_each_start(
    root: Path, tmp_path: Path, scans: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some buckets that are mounted as file systems have no times."""
    monkeypatch.setattr(module, "_times_of", lambda path: (0, 0))
    names(root, tmp_path / "kept")
    scans.clear()
    names(root, tmp_path / "kept")
    assert scans


@pytest.mark.parametrize("damage", ["text", "", None])
def test_without_a_usable_cache_folder_each_start_lists_all_folders(
    damage: str | None, root: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    expected = names(root, kept)
    if damage is None:
        kept = tmp_path / "file"
        kept.write_text("")
    else:
        next(kept.glob("*.npz")).write_text(damage)
    assert names(root, kept) == expected

"""Checkpoints in an object store, for the built-in trainer and for scripts: whole or absent, in the background."""

from __future__ import annotations

from ddpjob_bucket.stored import Bucket, BucketError, CopyManifest, Damaged, File, LibraryMissing, Stored, Vanished
from ddpjob_bucket.uploads import Uploads, Waiting

__all__ = [
    "Bucket",
    "BucketError",
    "CopyManifest",
    "Damaged",
    "File",
    "LibraryMissing",
    "Stored",
    "Uploads",
    "Vanished",
    "Waiting",
]

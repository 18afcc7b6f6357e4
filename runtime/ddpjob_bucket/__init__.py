"""Keeps whole checkpoints in an object store, in the background, for trainer and scripts."""

from __future__ import annotations

from ddpjob_bucket.stored import Bucket, BucketError, Damaged, File, LibraryMissing, Manifest, Stored, Vanished
from ddpjob_bucket.uploads import Uploads, Waiting

__all__ = [
    "Bucket",
    "BucketError",
    "Damaged",
    "File",
    "LibraryMissing",
    "Manifest",
    "Stored",
    "Uploads",
    "Vanished",
    "Waiting",
]

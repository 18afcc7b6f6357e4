"""Stores whole checkpoints in an object store in the background, for the trainer and scripts."""

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

"""The DDPJob API: the CRD file, manifest checks, and spec and status as dataclasses."""

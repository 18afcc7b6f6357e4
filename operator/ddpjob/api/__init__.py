"""The DDPJob API: the CRD file, checked manifests, and its spec and status as dataclasses."""

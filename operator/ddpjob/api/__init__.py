"""The DDPJob API: the CRD file, manifests checked against it, and its spec and status as dataclasses."""

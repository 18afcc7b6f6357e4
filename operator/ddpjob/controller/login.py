"""Credentials for kopf: the service account's, else the kubeconfig's."""

from __future__ import annotations

import dataclasses
import ssl
from typing import Any

import kopf


class Connection(kopf.ConnectionInfo):
    """Trusts the certificates that kubectl trusts.

    Since Python 3.13 the default context rejects certificates without key identifiers (RFC 5280),
    which Go accepts and which the authorities of many older clusters have issued.
    """

    def as_ssl_context(self) -> ssl.SSLContext:
        context = super().as_ssl_context()
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        return context


def login(**arguments: Any) -> kopf.ConnectionInfo | None:
    """Handles `kopf.on.login`; None: there are no credentials."""
    found = kopf.login_with_service_account(**arguments) or kopf.login_with_kubeconfig(**arguments)
    return (
        Connection(**{field.name: getattr(found, field.name) for field in dataclasses.fields(found)}) if found else None
    )

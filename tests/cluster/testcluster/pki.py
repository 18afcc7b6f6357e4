"""The cluster's certificates and kubeconfig files."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from testcluster.settings import ClusterError, Settings


@dataclass(frozen=True)
class Authority:
    """The cluster's own certificate authority."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate


def _name(common_name: str, organization: str | None = None) -> x509.Name:
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
    if organization:
        attributes.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
    return x509.Name(attributes)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, is_ca: bool
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=365))
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
    )


def _write_key(key: ec.EllipticCurvePrivateKey, path: Path) -> None:
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


def create_authority(settings: Settings) -> Authority:
    """Create the authority (`pki/ca.*`) and the key that signs service account tokens
    (`pki/sa.*`).
    """
    folder = settings.run / "pki"
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("ddpjob-test-ca")
    certificate = _builder(name, name, key, is_ca=True).sign(key, hashes.SHA256())
    _write_key(key, folder / "ca.key")
    (folder / "ca.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    accounts = ec.generate_private_key(ec.SECP256R1())
    _write_key(accounts, folder / "sa.key")
    public = accounts.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    (folder / "sa.pub").write_bytes(public)
    return Authority(key, certificate)


def load_authority(settings: Settings) -> Authority:
    """Return the authority of a running cluster."""
    folder = settings.run / "pki"
    key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ClusterError(f"{folder}/ca.key is not the key that `up` has written: run `python -m testcluster down`")
    return Authority(key, x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes()))


def _issue(
    settings: Settings, authority: Authority, stem: str, subject: x509.Name, extensions: list[x509.ExtensionType]
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(subject, authority.certificate.subject, key, is_ca=False)
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    certificate = builder.sign(authority.key, hashes.SHA256())
    _write_key(key, settings.run / "pki" / f"{stem}.key")
    (settings.run / "pki" / f"{stem}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def issue_server(settings: Settings, authority: Authority, stem: str, names: list[str], ips: list[str]) -> None:
    """Create a server's certificate, `pki/STEM.crt` and `.key`."""
    alternatives: list[x509.GeneralName] = [x509.DNSName(name) for name in names]
    alternatives += [x509.IPAddress(ipaddress.ip_address(ip)) for ip in ips]
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    _issue(settings, authority, stem, _name(stem), [x509.SubjectAlternativeName(alternatives), usage])


def issue_client(settings: Settings, authority: Authority, stem: str, user: str, group: str | None = None) -> Path:
    """Create a client's certificate, and return its kubeconfig file, `STEM.kubeconfig`."""
    _issue(settings, authority, stem, _name(user, group), [x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])])
    return _kubeconfig(settings, stem)


def _kubeconfig(settings: Settings, stem: str) -> Path:
    def data(file: str) -> str:
        return base64.b64encode((settings.run / "pki" / file).read_bytes()).decode()

    name = f"{settings.prefix}-test"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": name,
        "clusters": [
            {
                "name": name,
                "cluster": {
                    "server": f"https://{settings.addresses.api}:6443",
                    "certificate-authority-data": data("ca.crt"),
                },
            }
        ],
        "users": [
            {
                "name": stem,
                "user": {"client-certificate-data": data(f"{stem}.crt"), "client-key-data": data(f"{stem}.key")},
            }
        ],
        "contexts": [{"name": name, "context": {"cluster": name, "user": stem}}],
    }
    path = settings.run / f"{stem}.kubeconfig"
    path.touch(mode=0o600)
    path.write_text(json.dumps(config, indent=1))
    return path

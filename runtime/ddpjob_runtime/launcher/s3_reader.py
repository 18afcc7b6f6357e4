"""Reads and writes objects of a bucket over the S3 protocol, using only the standard library.

The server is not trusted, so its responses are checked and limited in size.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import hmac
import http.client
import json
import os
import re
import ssl
import threading
import time
import urllib.error
import urllib.request
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlencode, urlsplit

MOST_OBJECTS = 500_000
"""Maximum number of objects to list. Their names take about 150 MiB of memory. A larger data set
should be packed into shards, which can also be read faster.
"""
MOST_BYTES = 2**60
PIECE = 2**20
"""Maximum number of bytes that a download reads at a time."""
CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 60.0
"""Number of seconds without a byte after which a connection is closed. A connection that is merely
slow is kept.
"""
_MOST_PAGES = 10_000
_PAGE_BYTES = 16 * 2**20
_ERROR_BYTES = 64 * 1024
_RENEW_SECONDS = 300.0
"""Credentials are renewed before a request if they would expire in less than this many seconds."""
_PASSING = frozenset(
    {"SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "OperationAborted", "RequestTimeTooSkewed"}
)
"""Error codes that cause a request to be retried. RequestTimeTooSkewed is one of them, because a
job should not fail if the clock of a host has not been set yet.
"""
_PASSING_OF_KEYS = re.compile(r"\b(Throttling|ThrottlingException|TooManyRequestsException|IDPCommunicationError)\b")
"""Names of errors that a source of keys reports with HTTP 400 if many pods request keys at the same
time. The request is then retried.
"""
_UNRESERVED = "-_.~"


class BucketRefusal(Exception):
    """The bucket has refused a request, and a retry would not help.

    The job, its credentials or the bucket must be changed first. The message names the URL and the
    reason.
    """


class Away(Exception):
    """The bucket is currently unreachable, so the request should be retried."""


class Changed(Exception):
    """An object differs from its entry in the listing."""


@dataclass(frozen=True)
class Remote:
    """An object in a bucket.

    `name` is the object's key without the prefix of the BucketPlace. `etag` is the object's ETag
    without quotes.
    """

    name: str
    size: int
    etag: str


@dataclass(frozen=True)
class BucketPlace:
    """A place for objects: a server, a bucket, and a prefix of keys.

    The prefix is empty or ends with `/`.
    """

    url: str
    bucket: str
    prefix: str
    server: str
    region: str
    field: str = "storage.data"
    """The field in the job's spec that names this place. Error messages mention it."""

    @classmethod
    def read(cls, url: str, endpoint: str, region: str, field: str = "storage.data") -> BucketPlace:
        """Return the place that s3://BUCKET/PREFIX names.

        `endpoint` is the URL of the server; if it is empty, AWS is the server. If `region` is
        empty, us-east-1 is used. Raises BucketRefusal if `url` is invalid.
        """
        split = urlsplit(url)
        if split.scheme != "s3" or not split.netloc:
            raise BucketRefusal(f"{url!r}: must be s3://BUCKET/FOLDER")
        where = region or "us-east-1"
        prefix, server = split.path.strip("/"), endpoint.rstrip("/") or _aws("s3", where)
        return cls(url.rstrip("/"), split.netloc, f"{prefix}/" if prefix else "", server, where, field)


def region_of(given: str = "") -> str:
    """Return the given region; if it is empty, return the region that AWS's variables name."""
    known = os.environ.get
    return given or known("AWS_REGION", "") or known("AWS_DEFAULT_REGION", "")


@dataclass(frozen=True)
class Keys:
    """Keys for signing requests to AWS. `until` is the Unix time at which they expire."""

    access: str
    secret: str = field(repr=False)
    token: str = field(default="", repr=False)
    until: float = float("inf")


class Credentials:
    """Gets signing keys from the source that a container's variables name, and renews them in time.

    There are three sources: keys in the variables themselves, a role for the service account's
    token (IRSA), and EKS Pod Identity. The first one that is set is used. If none is set, requests
    are not signed, which is enough for a public bucket.
    """

    def __init__(self, variables: Mapping[str, str], region: str, field: str = "storage.data") -> None:
        self._variables, self._region, self._field = variables, region, field
        self._keys: Keys | None = None
        self._lock = threading.Lock()

    def keys(self) -> Keys | None:
        """Return the current keys; None if requests are not signed.

        Raises BucketRefusal, Away.
        """
        with self._lock:
            if self._keys is None or self._keys.until < time.time() + _RENEW_SECONDS:
                self._keys = self._read()
            return self._keys

    def renew(self, refused: Keys) -> bool:
        """Discard keys that the server has refused as expired, and return whether new keys may be
        available.

        The server's clock, not this host's, decides whether keys have expired.
        """
        with self._lock:
            if self._keys is refused and refused.until < float("inf"):
                self._keys = None
        return refused.until < float("inf")

    def _read(self) -> Keys | None:
        # Secrets often end with a newline.
        given = {name: value.strip() for name, value in self._variables.items()}
        known = given.get
        access, secret = known("AWS_ACCESS_KEY_ID", ""), known("AWS_SECRET_ACCESS_KEY", "")
        if access and secret:
            return Keys(access, secret, known("AWS_SESSION_TOKEN", ""))
        role, file = known("AWS_ROLE_ARN", ""), known("AWS_WEB_IDENTITY_TOKEN_FILE", "")
        if role and file:
            return self._fetch_role_keys(role, _text_of(file))
        uri = known("AWS_CONTAINER_CREDENTIALS_FULL_URI", "")
        if uri:
            file = known("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "")
            headers = {"Authorization": _text_of(file)} if file else {}
            body = _answer(urllib.request.Request(uri, headers=headers), "EKS Pod Identity")
            try:
                found = json.loads(body)
            except ValueError:
                found = {}
            return _keys_of(found, "Token", "EKS Pod Identity")
        if access or secret:
            here, missing = ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY")[:: 1 if access else -1]
            text = f"AWS_{here} is set, but AWS_{missing} is missing or empty"
            raise BucketRefusal(f"{text}; set both in the Secret that {self._field}.secretName names, or both in env")
        return None

    def _fetch_role_keys(self, role: str, token: str) -> Keys:
        query = {
            "Action": "AssumeRoleWithWebIdentity",
            "Version": "2011-06-15",
            "RoleArn": role,
            "RoleSessionName": self._variables.get("AWS_ROLE_SESSION_NAME", "ddpjob"),
            "WebIdentityToken": token,
        }
        server = self._variables.get("AWS_ENDPOINT_URL_STS", _aws("sts", self._region))
        body = _answer(urllib.request.Request(server, data=urlencode(query).encode()), f"the role {role}")
        found = {_tag(element): element.text or "" for element in _xml(body, "STS").iter()}
        return _keys_of(found, "SessionToken", f"the role {role}")


def _aws(service: str, region: str) -> str:
    """Return the URL of an AWS service in the given region."""
    return f"https://{service}.{region}.amazonaws.com" + (".cn" if region.startswith("cn-") else "")


def _text_of(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise BucketRefusal(f"cannot read the service account's token: {error}") from None


def _answer(request: urllib.request.Request, what: str) -> bytes:
    try:
        try:
            with urllib.request.urlopen(request, timeout=SILENCE_SECONDS) as answer:
                body = bytes(answer.read(_ERROR_BYTES))
                if len(body) < _ERROR_BYTES and answer.length:
                    raise Away(f"cannot get credentials from {what}: the response is incomplete")
                return body
        except urllib.error.HTTPError as error:
            # The connection may break while the response is being read.
            text = error.read(_ERROR_BYTES).decode(errors="replace")
            kind = Away if error.code >= 500 or error.code == 429 or _PASSING_OF_KEYS.search(text) else BucketRefusal
            raise kind(
                f"cannot get credentials from {what}: HTTP {error.code}: {' '.join(text.split())[:300]}"
            ) from None
    except (OSError, http.client.HTTPException) as error:
        raise Away(f"cannot get credentials from {what}: {error}") from None


def _keys_of(found: Mapping[str, Any], token: str, what: str) -> Keys:
    try:
        # Before version 3.11, Python cannot parse the suffix Z or Go's nine-digit fractions of a
        # second.
        text = re.sub(r"[.]\d+", "", str(found["Expiration"])).replace("Z", "+00:00")
        until = datetime.datetime.fromisoformat(text).timestamp()
        return Keys(str(found["AccessKeyId"]), str(found["SecretAccessKey"]), str(found[token]), until)
    except (KeyError, ValueError, TypeError):
        raise BucketRefusal(f"cannot get credentials from {what}: the response contains none") from None


class Reader:
    """A connection to the server of a BucketPlace, which is reopened after it breaks.

    Methods raise BucketRefusal, Away, Changed.
    """

    def __init__(self, place: BucketPlace, credentials: Credentials) -> None:
        self._place, self._credentials = place, credentials
        self._connection: http.client.HTTPConnection | None = None

    def objects(self) -> Iterator[Remote]:
        """Yield the objects whose keys start with the place's prefix, in the server's order.

        Empty objects that merely represent a folder are left out.
        """
        token, count, place = "", 0, self._place
        for _ in range(_MOST_PAGES):
            query = {"list-type": "2", "prefix": place.prefix, "encoding-type": "url", "max-keys": "1000"}
            if token:
                query["continuation-token"] = token
            page = self._page(query)
            values = {_tag(element): element.text or "" for element in page}
            for element in page:
                if _tag(element) != "Contents":
                    continue
                found = _object(element, place, quoted=values.get("EncodingType") == "url")
                if found.name and not (found.name.endswith("/") and found.size == 0):
                    yield found
                    count += 1
                if count > MOST_OBJECTS:
                    text = f"{place.url} has more than {MOST_OBJECTS} objects"
                    raise BucketRefusal(f"{text}; use a folder with fewer objects, or pack the files into shards")
            if values.get("IsTruncated") != "true":
                return
            token = values.get("NextContinuationToken", "")
            if not token:
                raise BucketRefusal(f"{place.server} does not speak S3: its listing lacks NextContinuationToken")
        raise BucketRefusal(f"{place.server} does not speak S3: its listing of {place.url} does not end")

    def _page(self, query: dict[str, str]) -> ET.Element:
        response = self._request("", query, {})
        body = self._read(response.read, _PAGE_BYTES + 1)
        if len(body) > _PAGE_BYTES:
            raise BucketRefusal(f"{self._place.server} does not speak S3: its listing is too large")
        if response.length:
            self.close()
            raise Away(f"{self._place.server} closed the connection: {response.length} bytes of a listing are missing")
        found = _xml(body, self._place.server)
        if _tag(found) != "ListBucketResult":
            raise BucketRefusal(
                f"{self._place.server} does not speak S3: its response is <{_tag(found)[:100]}>, not <ListBucketResult>"
            )
        return found

    def open(self, remote: Remote, offset: int) -> tuple[Mapping[str, str], Iterator[bytes]]:
        """Request an object, starting at byte `offset`.

        Return the response's headers, with names in lower case, and an iterator over pieces of the
        object.
        """
        headers = {"If-Match": f'"{remote.etag}"', "x-amz-checksum-mode": "ENABLED"}
        if offset:
            headers["Range"] = f"bytes={offset}-"
        response = self._request(self._place.prefix + remote.name, {}, headers)
        stored, sent = (response.getheader(name) for name in ("x-goog-stored-content-encoding", "Content-Encoding"))
        if stored == "gzip" and not sent:
            self.close()
            text = f"{self._place.url}/{remote.name} is stored with Content-Encoding gzip, which the server decodes"
            raise BucketRefusal(
                f"{text}, so the content differs from the listing; store the object without gzip, or with "
                "Cache-Control no-transform"
            )
        expected = f"bytes {offset}-{remote.size - 1}/{remote.size}"
        if offset and (response.status != 206 or response.getheader("Content-Range") != expected):
            self.close()
            raise Changed(
                f"{self._place.url}/{remote.name}: expected {expected}, but the server has a different object"
            )
        return {name.lower(): value for name, value in response.getheaders()}, self._pieces(response)

    def open_object(self, name: str) -> tuple[int, Iterator[bytes]]:
        """Request an object without listing the bucket.

        Return the object's size and an iterator over its pieces. Raises Changed if the object does
        not exist.
        """
        response = self._request(self._place.prefix + name, {}, {})
        if response.length is None:
            self.close()
            raise BucketRefusal(f"{self._place.server} does not speak S3: it does not send the size of an object")
        return response.length, self._pieces(response)

    def _pieces(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        while True:
            # Use `read1`, because `read` would wait for a full piece. On a slow connection, that
            # may take minutes.
            piece = self._read(response.read1, PIECE)
            if not piece:
                # Before Python 3.13, the connection cannot send another request while this response
                # is open.
                response.close()
                return
            yield piece

    def _read(self, read: Callable[[int], bytes], size: int) -> bytes:
        try:
            return read(size)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            raise Away(f"{self._place.server} closed the connection: {_explain(error)}") from None

    def close(self) -> None:
        """Close the connection. The next request opens a new one."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _request(
        self, key: str, query: dict[str, str], headers: dict[str, str], method: str = "GET", content: bytes = b""
    ) -> http.client.HTTPResponse:
        place = self._place
        path = quote(f"/{place.bucket}/{key}" if key else f"/{place.bucket}", safe="/" + _UNRESERVED)
        text = "&".join(f"{quote(k, safe=_UNRESERVED)}={quote(v, safe=_UNRESERVED)}" for k, v in sorted(query.items()))
        keys = self._credentials.keys()
        all_headers = {"Host": urlsplit(place.server).netloc, **headers}
        if keys is not None:
            all_headers = sign(keys, place.region, path, text, all_headers, time.gmtime(), method, content)
        try:
            if self._connection is None:
                self._connection = _connection(place.server)
                self._connection.connect()
                self._connection.sock.settimeout(SILENCE_SECONDS)
            target = f"{path}?{text}" if text else path
            self._connection.request(method, target, content or None, all_headers)
            response = self._connection.getresponse()
        except ssl.SSLCertVerificationError as error:
            self.close()
            text = f"the certificate of {place.server} is not trusted: {error.verify_message}"
            raise BucketRefusal(f"{text}; set AWS_CA_BUNDLE in env to a file with the server's CA") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            raise Away(f"{place.server} does not respond: {_explain(error)}") from None
        if response.status in (200, 204, 206):
            return response
        body = self._read(response.read, _ERROR_BYTES).decode(errors="replace")
        self.close()  # The rest of the response, if any, will not be read.
        raise self._problem(response, key, body, keys)

    def _problem(self, response: http.client.HTTPResponse, key: str, body: str, keys: Keys | None) -> Exception:
        place, status = self._place, response.status
        found = re.search(r"<Code>([A-Za-z0-9.]{1,100})</Code>", body)
        said = re.search(r"<Message>([^<]{1,500})</Message>", body)
        code = found[1] if found else ""
        text = f"{place.server} responds with HTTP {status} {code or response.reason}".rstrip()
        text += f" ({said[1].strip()})" if said else ""
        text += f" for {place.url}" + (f", object {key[len(place.prefix) :][:200]!r}" if key else "")
        if status >= 500 or status in (408, 425, 429) or code in _PASSING:
            return Away(text)
        if code == "ExpiredToken" and keys is not None and self._credentials.renew(keys):
            return Away(text)
        if key and (status in (404, 412, 416)) and code != "NoSuchBucket":
            return Changed(text)
        region = re.sub(r"[^-a-z0-9]", "", response.getheader("x-amz-bucket-region") or "")[:30]
        if region and region != place.region:
            return BucketRefusal(f"{text}; the bucket is in a different region; set {place.field}.region to {region}")
        if status in (401, 403):
            hint = f"check the keys in {place.field}.secretName and their permissions (s3:ListBucket, s3:GetObject)"
            none = f"there are no credentials, so the request was not signed; set {place.field}.secretName"
            return BucketRefusal(f"{text}; {none if keys is None else hint}")
        return BucketRefusal(f"{text}; check the URL, endpoint and region in {place.field}")


class BucketWriter(Reader):
    """A connection that can also change objects.

    Methods raise BucketRefusal, Away.
    """

    def put(self, name: str, content: bytes) -> None:
        """Create or replace an object."""
        self._read(self._request(self._place.prefix + name, {}, {}, "PUT", content).read, _ERROR_BYTES)

    def delete(self, name: str) -> None:
        """Delete an object if it exists."""
        self._read(self._request(self._place.prefix + name, {}, {}, "DELETE").read, _ERROR_BYTES)


def _connection(server: str) -> http.client.HTTPConnection:
    split = urlsplit(server)
    host, port = split.hostname or "", split.port
    if split.scheme == "http":
        return http.client.HTTPConnection(host, port, timeout=CONNECT_SECONDS)
    authority = os.environ.get("AWS_CA_BUNDLE") or None
    try:
        context = ssl.create_default_context(cafile=authority)
    except OSError as error:
        raise BucketRefusal(f"AWS_CA_BUNDLE={authority} cannot be used: {error.strerror or error}") from None
    proxy = "" if urllib.request.proxy_bypass(host) else urllib.request.getproxies().get("https", "")
    if not proxy:
        return http.client.HTTPSConnection(host, port, timeout=CONNECT_SECONDS, context=context)
    through = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    made = http.client.HTTPSConnection(through.hostname or "", through.port, timeout=CONNECT_SECONDS, context=context)
    headers = {}
    if through.username:
        login = f"{unquote(through.username)}:{unquote(through.password or '')}"
        headers["Proxy-Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
    made.set_tunnel(host, port or 443, headers)
    return made


def sign(
    keys: Keys, region: str, path: str, query: str, headers: Mapping[str, str], now: time.struct_time,
    method: str = "GET", content: bytes = b"",
) -> dict[str, str]:  # fmt: skip
    """Return a request's headers together with AWS's signature, version 4.

    `path` and `query` must be quoted, and the names in `query` must be sorted. See "Signature
    Version 4 signing process" on docs.aws.amazon.com.
    """
    moment, day = time.strftime("%Y%m%dT%H%M%SZ", now), time.strftime("%Y%m%d", now)
    digest = hashlib.sha256(content).hexdigest()
    signed = {**headers, "x-amz-content-sha256": digest, "x-amz-date": moment}
    if keys.token:
        signed["x-amz-security-token"] = keys.token
    lower = sorted((name.lower(), value.strip()) for name, value in signed.items())
    names = ";".join(name for name, _ in lower)
    lines = "".join(f"{name}:{value}\n" for name, value in lower)
    request = f"{method}\n{path}\n{query}\n{lines}\n{names}\n{digest}"
    scope = f"{day}/{region}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    key = f"AWS4{keys.secret}".encode()
    for part in (*scope.split("/"), text):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    value = f"AWS4-HMAC-SHA256 Credential={keys.access}/{scope}, SignedHeaders={names}, Signature={key.hex()}"
    return {**signed, "Authorization": value}


def _object(element: ET.Element, place: BucketPlace, *, quoted: bool) -> Remote:
    values = {_tag(child): child.text or "" for child in element}
    if values.get("ETag", "").startswith("W/"):
        text = f"{place.server} has weak ETags ({values['ETag'][:100]})"
        raise BucketRefusal(f"{text}, which cannot prove that an object is unchanged; use a server with strong ETags")
    try:
        key, size = values["Key"], int(values["Size"])
        key = unquote(key.replace("+", " "), errors="strict") if quoted else key
        if not key.startswith(place.prefix) or not 0 <= size <= MOST_BYTES or len(key.encode()) > 1024:
            raise ValueError
        etag = values["ETag"].strip('"')
        if not re.fullmatch(r"[-A-Za-z0-9+/=_.]{1,128}", etag):
            raise ValueError
    except (KeyError, ValueError):
        text = ET.tostring(element, encoding="unicode")[:300]
        raise BucketRefusal(f"{place.server} does not speak S3: its listing has the invalid entry {text}") from None
    return Remote(key[len(place.prefix) :], size, etag)


def _xml(body: bytes, server: str) -> ET.Element:
    try:
        if b"<!DOCTYPE" in body or b"<!ENTITY" in body:
            raise ValueError("it defines entities")
        return ET.fromstring(body)
    except (ET.ParseError, ValueError) as error:
        raise BucketRefusal(f"{server} does not speak S3: its response is not S3 XML ({error})") from None


def _tag(element: ET.Element) -> str:
    return str(element.tag).rpartition("}")[2]


def _explain(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:300]

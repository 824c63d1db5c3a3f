"""JSON over HTTP with the standard library: a body in, decoded JSON or an `HttpError` out."""

from __future__ import annotations

import http.client
import json
import ssl
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

from moored import __version__
from moored.errors import MooredError

LOOKUP_TIMEOUT_S = 10.0
MAX_RETRY_AFTER_S = 300.0
MAX_ERROR_BYTES = 1 << 16
MAX_SHOWN_CHARS = 300
_TRANSIENT = {408, 425, 429}


@dataclass(slots=True, eq=False)
class HttpError(Exception):
    """A request that brought nothing back."""

    message: str
    status: int | None = None
    """None when the server gave no HTTP answer, or one that cannot be read."""
    retry_after_s: float = 0.0
    is_unreachable: bool = False
    """True when no connection could be made."""

    @property
    def is_transient(self) -> bool:
        """Whether asking again may help."""
        return self.status is None or self.status in _TRANSIENT or self.status >= 500

    def __str__(self) -> str:
        return self.message


class JsonClient:
    """Sends JSON to one server; may be used from many threads. The key is in no message."""

    def __init__(self, url: str, *, api_key: str | None, timeout_s: float) -> None:
        self.url = _check_url(url)
        self._api_key = _check_key(api_key)
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json", "User-Agent": f"moored/{__version__}"}
        if self._api_key:
            self._headers["Authorization"] = f"Bearer {self._api_key}"
        # One TLS context for all: each would read the list of certificates anew.
        tls = urllib.request.HTTPSHandler(context=ssl.create_default_context())
        self._opener = urllib.request.build_opener(tls, _StayHere)

    def post(self, path: str, body: object) -> object:
        """Send a body, wait for the answer."""
        return self._send(path, json.dumps(body).encode(), self._timeout_s)

    def get(self, path: str) -> object:
        """Look something up; does not wait long."""
        return self._send(path, None, min(LOOKUP_TIMEOUT_S, self._timeout_s))

    def _send(self, path: str, data: bytes | None, timeout_s: float) -> object:
        request = urllib.request.Request(self.url + path, data, self._headers)
        try:
            with self._opener.open(request, timeout=timeout_s) as response:
                body: bytes = response.read()
        except urllib.error.HTTPError as error:
            raise self._refusal(error) from None
        # UnicodeError: a host name that cannot be looked up.
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            raise self._no_answer(error, timeout_s) from None
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            start = body[:MAX_ERROR_BYTES].decode("utf-8", "replace")
            raise HttpError(f"the answer is not JSON: {self.show(start) or 'empty'}") from None

    def _refusal(self, error: urllib.error.HTTPError) -> HttpError:
        with error:
            try:
                body = error.read(MAX_ERROR_BYTES)
            except (OSError, http.client.HTTPException):
                body = b""
        says = self.show(server_message(body.decode("utf-8", "replace")))
        where = error.headers.get("Location") if 300 <= error.code < 400 else None
        parts = [self.show(f"{error.code} {error.reason}"), says, self.show(where or "")]
        wait_s = parse_retry_after(error.headers.get("Retry-After"))
        return HttpError(": ".join(filter(None, parts)), status=error.code, retry_after_s=wait_s)

    def _no_answer(self, error: Exception, timeout_s: float) -> HttpError:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, TimeoutError):
            return HttpError(f"no answer within {timeout_s:g} s")
        broke = isinstance(reason, ConnectionError | http.client.HTTPException)
        refused = isinstance(reason, ConnectionRefusedError)
        text = self.show(str(reason) or type(reason).__name__)
        return HttpError(text, is_unreachable=refused or not broke)

    def show(self, text: str) -> str:
        """Foreign text for a message: one short printable line without the key."""
        if self._api_key:
            text = text.replace(self._api_key, "***")
        printable = "".join(char if char.isprintable() else " " for char in text)
        return " ".join(printable.split())[:MAX_SHOWN_CHARS]


class _StayHere(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the key is for the server that was named."""

    def redirect_request(self, *_: object) -> None:
        return None


def server_message(text: str) -> str:
    """What an error body says, in any of the shapes servers use; else the body itself."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    while isinstance(found, dict):
        found = next((found[key] for key in ("error", "message", "detail") if key in found), None)
    return found if isinstance(found, str) else text


def parse_retry_after(value: str | None) -> float:
    """Seconds a `Retry-After` header asks for, as a number or a date; 0 for none."""
    if value is None:
        return 0.0
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return max(0.0, min(seconds, MAX_RETRY_AFTER_S))


def _check_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        parts, is_whole = None, False
    if parts is not None and "@" in parts.netloc:
        raise MooredError(
            "the endpoint's address holds a user name or password; leave it out, and put the key "
            "into an environment variable"
        )
    if not is_whole or not url.isprintable() or " " in url:
        raise MooredError(f"the endpoint must look like http://host:8000/v1, got {url!r}")
    return url.rstrip("/").removesuffix("/chat/completions")


def _check_key(key: str | None) -> str:
    key = (key or "").strip()
    if not (key.isascii() and key.isprintable()):
        raise MooredError(
            "the API key holds characters that no HTTP header can carry; copy it again"
        )
    return key

"""JSON over HTTP: a body in, decoded JSON or an `HttpError` out.

httpx2 is the maintained continuation of httpx, with the same interface; the Hugging Face hub client
needs it too, so `moored[train]` holds one HTTP library, not two.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import httpx2

from moored import __version__
from moored.errors import MooredError

LOOKUP_TIMEOUT_S = 10.0
MAX_RETRY_AFTER_S = 300.0
MAX_READ_CHARS = 1 << 16
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
    is_timeout: bool = False
    """True when the server took too long."""

    @property
    def is_transient(self) -> bool:
        """Whether asking again may help."""
        return self.status is None or self.status in _TRANSIENT or self.status >= 500

    def __str__(self) -> str:
        return self.message

    def with_remedy(self) -> str:
        """The message, and what to do where nothing listens at the address."""
        remedy = "; start the server first, or check the address" if self.is_unreachable else ""
        return f"{self.message}{remedy}"


class JsonClient:
    """Sends JSON to one server; may be used from many threads. No message shows the key."""

    def __init__(self, url: str | None, *, api_key: str | None, timeout_s: float) -> None:
        if url is None:
            raise MooredError("an endpoint needs its address; set engine.endpoint.url")
        self.url = _check_url(url)
        self._api_key = _check_key(api_key)
        self._timeout_s = timeout_s
        headers = {"User-Agent": f"moored/{__version__}", "Content-Type": "application/json"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        self._client = httpx2.Client(
            headers=headers,
            # The callers bound how many requests are under way.
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            # The key is for the server that was named.
            follow_redirects=False,
        )

    def close(self) -> None:
        """Close the connections that are kept open."""
        self._client.close()

    def post(self, path: str, body: object) -> object:
        """Send a body, wait for the answer."""
        return self._send("POST", path, body, self._timeout_s)

    def tell(self, path: str, body: object) -> None:
        """Send a body, wait until it is dealt with; the answer may be empty."""
        self._send("POST", path, body, self._timeout_s, reads=False)

    def get(self, path: str) -> object:
        """Look something up; does not wait long."""
        return self._send("GET", path, None, min(LOOKUP_TIMEOUT_S, self._timeout_s))

    def check_reachable(self) -> None:
        """Raise an HttpError when nothing answers at the address; any answer will do."""
        try:
            self.get("/")
        except HttpError as error:
            if error.is_unreachable or error.is_timeout:
                raise

    def delete(self, path: str) -> object:
        """Have something deleted; does not wait long."""
        return self._send("DELETE", path, None, min(LOOKUP_TIMEOUT_S, self._timeout_s))

    def _send(
        self, method: str, path: str, body: object, timeout_s: float, *, reads: bool = True
    ) -> object:
        # In ASCII: text of a model may hold half a surrogate pair, which UTF-8 cannot.
        content = None if body is None else json.dumps(body, allow_nan=False).encode()
        try:
            with self._client.stream(
                method, self.url + path, content=content, timeout=timeout_s
            ) as response:
                if not response.is_success:
                    raise self._refusal(response, timeout_s)
                data = _read_body(response, timeout_s)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise self._no_answer(error, timeout_s) from None
        try:
            return json.loads(data) if reads else None
        except (ValueError, RecursionError):
            text = self.show(data.decode("utf-8", "replace"))
            raise HttpError(f"the answer is not JSON: {text or 'empty'}") from None

    def _refusal(self, response: httpx2.Response, timeout_s: float) -> HttpError:
        try:
            body = _read_body(response, timeout_s)
        except httpx2.HTTPError:
            body = b""
        says = server_message(body.decode("utf-8", "replace"))
        where = response.headers.get("Location", "") if response.has_redirect_location else ""
        parts = [f"{response.status_code} {response.reason_phrase}", says, where]
        return HttpError(
            ": ".join(filter(None, map(self.show, parts))),
            status=response.status_code,
            retry_after_s=parse_retry_after(response.headers.get("Retry-After")),
        )

    def _no_answer(self, error: Exception, timeout_s: float) -> HttpError:
        if isinstance(error, httpx2.TimeoutException):
            return HttpError(f"no answer within {timeout_s:g} s", is_timeout=True)
        # Once connected, any failure may be temporary.
        broke = isinstance(
            error,
            httpx2.ReadError | httpx2.WriteError | httpx2.ProtocolError | httpx2.DecodingError,
        )
        text = self.show(str(error) or type(error).__name__)
        return HttpError(text, is_unreachable=not broke)

    def show(self, text: str) -> str:
        """A server's text for a message: one short printable line without the key."""
        text = text[:MAX_READ_CHARS]
        if self._api_key:
            text = text.replace(self._api_key, "***")
        printable = "".join(char if char.isprintable() else " " for char in text)
        return " ".join(printable.split())[:MAX_SHOWN_CHARS]


def _read_body(response: httpx2.Response, timeout_s: float) -> bytes:
    """The body; the time limit is for all of it."""
    start, data = time.monotonic(), bytearray()
    for chunk in response.iter_bytes():
        data += chunk
        if time.monotonic() - start > timeout_s:
            raise httpx2.ReadTimeout("the body took too long")
    return bytes(data)


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

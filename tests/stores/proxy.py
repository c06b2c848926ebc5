"""A proxy in front of an object store that treats requests as a test wants it."""

import re
import sys
import threading
import time
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from http import HTTPStatus

from . import serving
from .serving import Reply


ALWAYS = range(1, sys.maxsize)
# Of S3, and of the JSON API of GCS.
LIST = r"[?&]list-type=2|/o(\?|$)"
_CODES = {403: "AccessDenied", 500: "InternalError", 503: "SlowDown"}
_RANGE = re.compile(r"(?<=[?&])(prefix|startOffset|endOffset)=[^&]*")
_CONDITIONS = {"if-match", "if-none-match"}
_CONDITION = re.compile(r"(?<=[?&])ifGeneration(?:Not)?Match=[^&]*&?")
_NONCE = re.compile(r"[?&]tensorstore=[^&]*")


@dataclass(eq=False)
class Rule:
    """What becomes of some of the requests that match, which count from 1."""

    action: Callable[["Exchange"], None]
    method: str = ""  # or any
    path: str = ""  # a regular expression, to be found in the path and the query
    when: Container[int] = ALWAYS
    seen: int = field(default=0, init=False)  # how many requests matched
    struck: int = field(default=0, init=False)  # and on how many of them it acted

    def strikes(self, method: str, path: str) -> bool:
        """Whether to act on this request; it counts."""
        if self.method not in ("", method) or not re.search(self.path, path):
            return False
        self.seen += 1
        return self.seen in self.when


@dataclass(eq=False)
class Request:
    """A request, what the store said to it, and what the client was told."""

    method: str
    path: str  # with the query
    stored: int = 0  # a status; 0 if the store was not asked
    status: int = 0  # or 0 if there was no answer


class Proxy(serving.Server):
    """Forwards every request to a store, unless one of its `rules` strikes.

    The first rule that strikes acts, but each counts. `rules` may change at any time.
    """

    def __init__(self, store: serving.Store) -> None:
        self.store = store
        self.rules: list[Rule] = []
        self.requests: list[Request] = []
        self._lock = threading.Lock()
        super().__init__(Exchange)

    def add(
        self,
        action: Callable[["Exchange"], None],
        method: str = "",
        path: str = "",
        when: Container[int] = ALWAYS,
    ) -> Rule:
        """Add a rule to those that there are."""
        self.rules.append(rule := Rule(action, method, path, when))
        return rule

    def found(self, method: str = "", path: str = "") -> list[Request]:
        """The requests so far with this method and this regular expression."""
        return [
            request
            for request in list(self.requests)
            if method in ("", request.method) and re.search(path, request.path)
        ]

    def receive(self, request: Request) -> Callable[["Exchange"], None]:
        """Record a request; what is to be done with it."""
        with self._lock:
            self.requests.append(request)
            rules = list(self.rules)
            striking = [r for r in rules if r.strikes(request.method, request.path)]
            if not striking:
                return passed
            striking[0].struck += 1
            return striking[0].action


class Exchange(serving.Exchange):
    """A request on its way, as an action sees it; it may change it before `forward`."""

    server: Proxy  # pyright: ignore[reportIncompatibleVariableOverride]

    def respond(self) -> None:
        self.record = Request(self.command, self.path)
        self.server.receive(self.record)(self)

    def forward(self) -> Reply:
        """Ask the store."""
        reply = self.server.store.ask(self)
        self.record.stored = reply.status
        return reply

    def reply(self, reply: Reply) -> None:
        """Answer the client."""
        self.record.status = reply.status
        status, headers, body, length = reply
        self.answer(status, headers, body, length=length)


def passed(exchange: Exchange) -> None:
    """Nothing happens to the request."""
    exchange.reply(exchange.forward())


def answered(status: int, code: str = "") -> Callable[[Exchange], None]:
    """The store is not asked: it "answers" an error."""
    code = code or _CODES.get(status, HTTPStatus(status).phrase)
    xml = f"<Error><Code>{code}</Code><Message>By a rule.</Message></Error>"
    json = f'{{"error": {{"code": {status}, "message": "{code}"}}}}'

    def action(exchange: Exchange) -> None:
        # A LIST of TensorStore finds nothing in the JSON, but would stop at XML.
        is_gcs = "/storage/v1/" in exchange.path
        kind, body = ("json", json) if is_gcs else ("xml", xml)
        headers = {"Content-Type": f"application/{kind}"}
        exchange.reply(Reply(status, headers, body.encode(), None))

    return action


def reset(exchange: Exchange) -> None:
    """The connection is reset before the store is asked."""
    exchange.abort()


def lost(exchange: Exchange) -> None:
    """The store does it, but the connection is reset before the answer."""
    exchange.forward()
    exchange.abort()


def halved(exchange: Exchange) -> None:
    """Half of the answer's body comes, and nothing says that there was more."""
    reply = exchange.forward()
    exchange.reply(reply._replace(body=reply.body[: len(reply.body) // 2]))


def torn(exchange: Exchange) -> None:
    """The connection ends after half of the answer's body."""
    reply = exchange.forward()
    whole = len(reply.body)
    exchange.reply(reply._replace(body=reply.body[: whole // 2], length=whole))


def flipped(exchange: Exchange) -> None:
    """One bit of the answer's body is another."""
    reply = exchange.forward()
    exchange.reply(reply._replace(body=_flip(reply.body)))


def misspelled(exchange: Exchange) -> None:
    """One bit of the first name of an attempt is another."""
    reply = exchange.forward()
    body = re.sub(rb"(@|%40)[0-9a-f]", rb"\1g", reply.body, count=1)
    exchange.reply(reply._replace(body=body, length=len(body)))


def flipped_request(exchange: Exchange) -> None:
    """One bit of the request's body is another."""
    exchange.body = _flip(exchange.body)
    passed(exchange)


def hung(exchange: Exchange) -> None:
    """There is no answer, until the proxy stops."""
    exchange.server.stopping.wait()
    exchange.abort()


def slow(seconds: float) -> Callable[[Exchange], None]:
    """The request waits before the store is asked."""

    def action(exchange: Exchange) -> None:
        exchange.server.stopping.wait(seconds)
        passed(exchange)

    return action


class Line:
    """A hop that takes whole requests in, and a line that carries one after the other.

    **Attributes:**

    - `longest`: the most bytes that waited at a time.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate  # bytes in a second
        self._lock = threading.Lock()
        self._free = 0.0
        self.longest = 0.0

    def __call__(self, exchange: Exchange) -> None:
        self._carry(exchange, len(exchange.body))
        passed(exchange)

    def back(self, exchange: Exchange) -> None:
        """The same, for replies."""
        reply = exchange.forward()
        self._carry(exchange, len(reply.body))
        exchange.reply(reply)

    def _carry(self, exchange: Exchange, nbytes: int) -> None:
        with self._lock:
            now = time.monotonic()
            self._free = max(self._free, now) + nbytes / self._rate
            wait = self._free - now
            self.longest = max(self.longest, wait * self._rate)
        exchange.server.stopping.wait(wait)


def stale() -> Callable[[Exchange], None]:
    """Each request is answered as when it was first made."""
    first: dict[str, Reply] = {}

    def action(exchange: Exchange) -> None:
        reply = exchange.forward()
        exchange.reply(first.setdefault(_NONCE.sub("", exchange.path), reply))

    return action


def blind(exchange: Exchange) -> None:
    """A LIST finds nothing, as before the first object was there."""
    exchange.path = _RANGE.sub(r"\1=nothing", exchange.path)
    passed(exchange)


def unconditional(exchange: Exchange) -> None:
    """The store ignores the request's conditions."""
    for name in _CONDITIONS:
        del exchange.headers[name]
    exchange.path = _CONDITION.sub("", exchange.path)
    passed(exchange)


def _flip(body: bytes) -> bytes:
    middle = len(body) // 2
    changed = bytes(byte ^ 1 for byte in body[middle : middle + 1])
    return body[:middle] + changed + body[middle + 1 :]

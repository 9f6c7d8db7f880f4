"""The service over HTTP: the Open Inference Protocol v2, metrics, and a page to look at.

An ASGI application. Of a request with binary tensors the head is read first, and the rest only if
it can be answered in time.
"""

import math
import re
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

import msgspec

from torchrec_bls.serve import siblings
from torchrec_bls.serve.connections import arrived, one_write, told_when_gone
from torchrec_bls.serve.desk import AT_FRONT, Desk, Ticket
from torchrec_bls.serve.json_heads import JsonHead
from torchrec_bls.serve.outcomes import Outcome, RequestError, bad
from torchrec_bls.serve.serving_facts import ServingFacts

_Scope = MutableMapping[str, Any]
_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_Headers = Sequence[tuple[bytes, bytes]]
# Status, type and body of what may be got, and the function that returns it.
_Got = tuple[int, bytes, bytes]
_Page = Callable[[], Awaitable[_Got]]

_JSON, _HTML = b"application/json", b"text/html; charset=utf-8"
_METRICS = b"text/plain; version=0.0.4; charset=utf-8"
_BINARY = b"application/octet-stream"
_AT_FRONT = AT_FRONT.encode()
_GETS = b"GET, HEAD"
_HEAD_SIZE = b"inference-header-content-length"
# Bytes that a number in JSON takes at least, with a comma.
_NUMBER_BYTES = 2
_MODEL = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?(?:/(infer|ready))?")


class RestApplication:
    """Answers HTTP requests.

    Args:
        desk: where inference requests come in.
        facts: what else callers may ask.
    """

    def __init__(self, desk: Desk, facts: ServingFacts) -> None:
        self._desk = desk
        self._facts = facts
        self._max_body = desk.engine.contract.max_body_bytes
        self._pages: dict[str, _Page] = {
            "/": self._page,
            "/metrics": self._metrics,
            siblings.PATH: _at_once(lambda: _json(200, facts.report())),
            "/openapi.json": _at_once(lambda: _json(200, facts.openapi())),
            "/v2": _at_once(lambda: _json(200, facts.server_metadata())),
            "/v2/health/live": _at_once(lambda: _json(200, {"live": True})),
            "/v2/health/ready": _at_once(self._readiness),
        }

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """Answers a request, as ASGI has it."""
        if scope["type"] != "http":  # "lifespan" has nothing to start
            return
        try:
            found = _MODEL.fullmatch(scope["path"])
            if found and found[3] == "infer":
                await self._infer(found[1], found[2] or "", scope, receive, send)
            else:
                await self._get(scope, found, send)
        except RequestError as error:
            if error.outcome is not Outcome.GONE:
                await _send_error(
                    scope, send, error, b"POST" if found and found[3] == "infer" else _GETS
                )

    async def _infer(
        self, model: str, version: str, scope: _Scope, receive: _Receive, send: _Send
    ) -> None:
        headers = dict(scope["headers"])
        at_front = headers.get(_AT_FRONT, b"").decode("latin-1")
        with self._desk.request("http", arrived(scope), at_front) as ticket:
            if scope["method"] != "POST":
                raise RequestError(Outcome.WRONG_METHOD, "inference requests are POSTs")
            self._facts.check_name(model)
            if headers.get(b"content-encoding", b"identity") != b"identity":
                raise bad("Content-Encoding: send the body as it is")
            if b"upgrade" in headers:  # what follows it would be lost
                raise bad("Upgrade: this port speaks HTTP/1.1 alone, send none (curl --http1.1)")
            body = _Body(receive, headers, self._max_body)
            head_size = _size_in(headers, _HEAD_SIZE)
            if head_size is None:
                self._guess(ticket, body.announced)
                text, rest = await body.all(), memoryview(b"")
                request = self._admitted(ticket, text, version)
            else:
                request = self._admitted(ticket, await body.first(head_size), version)
                if not body.is_whole:
                    await body.all()
                    ticket.check()
                rest = memoryview(await body.all())[head_size:]
            contents = request.contents(rest)
            with told_when_gone(scope, ticket.leave):
                answer = await ticket.answer(contents)
            reply, json_size = request.reply(answer, self._facts.name)
            if json_size is None:
                await _respond(scope, send, 200, _JSON, reply)
            else:
                await _respond(scope, send, 200, _BINARY, reply, [(_HEAD_SIZE, b"%d" % json_size)])

    def _admitted(self, ticket: Ticket, text: bytes | memoryview, version: str) -> JsonHead:
        request = JsonHead(text, version)
        self._facts.check_outputs(request.asked)
        ticket.admit(request.head)
        return request

    def _guess(self, ticket: Ticket, announced: int | None) -> None:
        """Refuses JSON before it is parsed, if others wait and it may be too much."""
        engine = self._desk.engine
        if announced is not None and engine.waiting:
            numbers = announced // _NUMBER_BYTES
            samples = numbers // max(1, len(engine.inputs.features))
            engine.check(samples, numbers, engine.deadline(ticket.arrived, None))

    async def _get(self, scope: _Scope, found: "re.Match[str] | None", send: _Send) -> None:
        page = self._of_model(*found.groups()) if found else self._pages.get(scope["path"])
        if page is None:
            raise RequestError(Outcome.UNKNOWN, f"nothing at {scope['path']}: see /openapi.json")
        if scope["method"] not in ("GET", "HEAD"):
            raise RequestError(Outcome.WRONG_METHOD, f"{scope['path']} takes GET")
        await _respond(scope, send, *await page())

    def _of_model(self, name: str, version: str | None, ready: str | None) -> _Page:
        self._facts.check_name(name)
        if version and version != self._desk.engine.version:
            raise RequestError(Outcome.UNKNOWN, f"version '{version}' is not served")
        if ready:
            return _at_once(self._readiness)
        return _at_once(lambda: _json(200, self._facts.model_metadata()))

    async def _page(self) -> _Got:
        return 200, _HTML, (await self._facts.page()).encode()

    async def _metrics(self) -> _Got:
        return 200, _METRICS, await self._facts.metrics()

    def _readiness(self) -> _Got:
        problem = self._facts.why_not_ready()
        if problem:
            return _json(503, {"ready": False, "error": problem})
        return _json(200, {"ready": True})


class _Body:
    """The body of a request, as it comes.

    Args:
        receive: function that returns its next part.
        headers: headers of the request.
        limit: bytes that it may have.

    Attributes:
        announced: bytes that the headers announce, or None.
        is_whole: whether all of it has come.

    Raises:
        RequestError: the headers announce too many.
    """

    def __init__(self, receive: _Receive, headers: dict[bytes, bytes], limit: int) -> None:
        self._receive = receive
        self._limit = limit
        self._parts: list[bytes] = []
        self._size = 0
        self.is_whole = False
        self.announced = _size_in(headers, b"content-length")
        if self.announced is not None and self.announced > limit:
            raise self._too_large(self.announced)

    async def first(self, size: int) -> memoryview:
        """Returns its first bytes, as soon as they are there."""
        while self._size < size and not self.is_whole:
            await self._next()
        if self._size < size:
            raise bad(f"{_HEAD_SIZE.decode()} is {size}, but the body has {self._size} bytes")
        self._parts = [b"".join(self._parts)]
        return memoryview(self._parts[0])[:size]

    async def all(self) -> bytes:
        """Returns all of it."""
        while not self.is_whole:
            await self._next()
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)

    async def _next(self) -> None:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise RequestError(Outcome.GONE, "the caller has left")
        part: bytes = message.get("body", b"")
        self._size += len(part)
        if self._size > self._limit:
            raise self._too_large(self._size)
        self._parts.append(part)
        self.is_whole = not message.get("more_body", False)

    def _too_large(self, size: int) -> RequestError:
        text = f"a body of {size} bytes or more, but it may have {self._limit}: send several"
        return RequestError(Outcome.TOO_LARGE, text)


def _size_in(headers: dict[bytes, bytes], name: bytes) -> int | None:
    value = headers.get(name)
    if value is None:
        return None
    if not value.isdigit() or len(value) > 18:
        raise bad(f"{name.decode()} is {value.decode('latin-1')!r}, but must be a number of bytes")
    return int(value)


async def _respond(
    scope: _Scope, send: _Send, status: int, kind: bytes, body: bytes, headers: _Headers = ()
) -> None:
    sent = [(b"content-type", kind), (b"content-length", b"%d" % len(body)), *headers]
    with one_write(scope):
        await send({"type": "http.response.start", "status": status, "headers": sent})
        await send({"type": "http.response.body", "body": body})


def _at_once(got: Callable[[], _Got]) -> _Page:
    async def page() -> _Got:
        return got()

    return page


def _json(status: int, value: Any) -> _Got:
    return status, _JSON, msgspec.json.encode(value)


async def _send_error(scope: _Scope, send: _Send, error: RequestError, allowed: bytes) -> None:
    headers = []
    if error.retry_s is not None:  # whole seconds are all that HTTP knows
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_s))))
    if error.outcome is Outcome.WRONG_METHOD:
        headers.append((b"allow", allowed))
    await _respond(scope, send, *_json(error.outcome.status, {"error": error.text}), headers)

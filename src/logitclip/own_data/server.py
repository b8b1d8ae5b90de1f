"""Serve a review to browsers on this machine.

The server listens on 127.0.0.1 only. The address has a secret, which becomes a cookie and leaves the address. Every
request needs the cookie and a local Host; answers are accepted only as JSON by POST from the page itself. Pictures are
requested by row number, never by path.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from logitclip.files import CannotWrite, Json
from logitclip.own_data.review import Review, content_policy
from logitclip.text import explain_missing

if TYPE_CHECKING:
    import uvicorn
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    Handle = Callable[[Request, Json], Response]
    Endpoint = Callable[[Request], Awaitable[Response]]

HOST = "127.0.0.1"
LOCAL = ("127.0.0.1", "localhost")
PORT = 8765  # the first one to try
LARGEST_REQUEST = 10_000  # bytes of a request
MOST_ITEMS = 60


def make_app(review: Review, secret: str, port: int) -> ASGIApp:
    """Return the ASGI application. The first address has to name the secret.

    The port is in the cookie's name, so that two servers do not share it.
    """
    with explain_missing("The review page needs Starlette and uvicorn", "review"):
        from starlette.applications import Starlette
        from starlette.routing import Route

    gate, pages = _Gate(secret, f"logitclip_{port}"), _Pages(review)
    routes = [
        Route("/", gate.enter(pages.show)),
        Route("/next", gate.guard(pages.next_items)),
        Route("/answer", gate.guard(pages.answer), methods=["POST"]),
        Route("/undo", gate.guard(pages.undo), methods=["POST"]),
        Route("/picture/{place:int}", gate.guard(pages.picture)),
    ]
    return _with_headers(Starlette(routes=routes))


@dataclass
class _Gate:
    """Lets requests through that come from the page on this machine."""

    secret: str  # what the first address has to name, and the cookie to hold
    cookie: str  # its name

    def enter(self, handle: Handle) -> Endpoint:
        """Return the endpoint of the first address: the secret in it becomes a cookie."""
        from starlette.responses import RedirectResponse

        guarded_endpoint = self.guard(handle)

        async def endpoint(request: Request) -> Response:
            if "key" not in request.query_params:
                return await guarded_endpoint(request)
            if request.headers.get("host", "").rpartition(":")[0] not in LOCAL:
                return _refuse("This server answers to 127.0.0.1 and localhost only.")
            if not hmac.compare_digest(request.query_params["key"].encode(), self.secret.encode()):
                return _refuse("The secret in this address is wrong: `logitclip review` printed the right one.")
            found = RedirectResponse("/", 303)
            found.set_cookie(self.cookie, self.secret, httponly=True, samesite="strict", path="/")
            return found

        return endpoint

    def guard(self, handle: Handle) -> Endpoint:
        """Return an endpoint that checks a request, reads its values and calls `handle` in a thread."""
        from starlette.concurrency import run_in_threadpool

        async def endpoint(request: Request) -> Response:
            problem = self._check(request)
            if problem is not None:
                return problem
            values: Json = dict(request.query_params)
            if request.method == "POST":
                content = b""
                async for chunk in request.stream():
                    content += chunk
                    if len(content) > LARGEST_REQUEST:
                        return _refuse(f"A request has at most {LARGEST_REQUEST:,} bytes.", 413)
                try:
                    values = json.loads(content)
                except (ValueError, RecursionError):
                    values = []  # type: ignore[assignment]
                if not isinstance(values, dict):
                    return _refuse("The request is not a JSON object.", 400)
            try:
                return await run_in_threadpool(handle, request, values)
            except (ValueError, KeyError, TypeError) as error:
                return _refuse(str(error) or "The request is not complete.", 400)
            except CannotWrite as error:
                return _refuse(f"The answer is not saved. {error}", 507)

        return endpoint

    def _check(self, request: Request) -> Response | None:
        host = request.headers.get("host", "")
        if host.rpartition(":")[0] not in LOCAL:
            return _refuse("This server answers to 127.0.0.1 and localhost only.")
        if not hmac.compare_digest(request.cookies.get(self.cookie, "").encode(), self.secret.encode()):
            return _refuse("Open the address that `logitclip review` printed: it has the secret that is needed.")
        if request.method == "POST":
            if request.headers.get("origin") != f"http://{host}":
                return _refuse("Answers are accepted from the review page only.")
            if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
                return _refuse("Answers must be JSON.", 415)
        return None


@dataclass
class _Pages:
    """What the server answers to requests that `_Gate` has let through."""

    review: Review

    def show(self, request: Request, values: Json) -> Response:
        from starlette.responses import HTMLResponse

        nonce = secrets.token_urlsafe(16)
        shown = HTMLResponse(self.review.page(nonce))
        shown.headers["content-security-policy"] = content_policy(nonce, served=True)
        return shown

    def next_items(self, request: Request, values: Json) -> Response:
        return self._with_items(values)

    def answer(self, request: Request, values: Json) -> Response:
        place = values["id"]
        if type(place) is not int:
            raise ValueError(f"The id of a row is a number, not {place!r}.")
        texts = [_read_text(values, name) for name in ("digest", "kind", "label", "reviewer")]
        hidden = self.review.answer(place, *texts)
        return self._with_items(values, saved=True, hidden=hidden)

    def undo(self, request: Request, values: Json) -> Response:
        item = self.review.undo(_read_text(values, "reviewer"))
        return self._with_items(values, items=[] if item is None else [item])

    def picture(self, request: Request, values: Json) -> Response:
        from starlette.responses import Response

        place, rows = request.path_params["place"], self.review.rows
        content = rows.picture(place) if place < len(rows) else None
        if content is None:
            return _refuse("This row has no picture that can be read.", 404)
        return Response(content, media_type="image/png", headers={"cache-control": "private, max-age=3600"})

    def _with_items(self, values: Json, items: list[Json] | None = None, **more: object) -> Response:
        from starlette.responses import JSONResponse

        session, reviewer = _read_text(values, "session"), _read_text(values, "reviewer")
        count = max(0, min(int(values.get("count", 1)), MOST_ITEMS))
        found = self.review.next_items(session, count, reviewer) if items is None else items
        return JSONResponse({"items": found, "state": self.review.state(reviewer), **more})


def _refuse(sentence: str, status: int = 403) -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse({"error": sentence}, status)


def _read_text(values: Json, name: str) -> str:
    value = values.get(name, "")
    if not isinstance(value, str) or len(value) > 1000:
        raise ValueError(f"The value of {name!r} must be a short text.")
    return value


def _with_headers(app: ASGIApp) -> ASGIApp:
    """Add the headers that every response has."""
    always = [
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        (b"cross-origin-resource-policy", b"same-origin"),
        (b"cross-origin-opener-policy", b"same-origin"),
    ]

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_more(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                extra = [*always, (b"cache-control", b"no-store")]
                message["headers"] = [*message["headers"], *(pair for pair in extra if pair[0] not in given)]
            await send(message)

        await app(scope, receive, send_more)

    return respond


def open_socket(port: int = 0) -> socket.socket:
    """Listen on 127.0.0.1: on the named port, or on 8765, or, if that is taken, on any.

    Raises:
        ValueError: If the named port is taken.
    """
    for wanted in (port,) if port else (PORT, 0):
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, wanted))
            listener.listen(128)  # fails if another process has bound the port at the same moment
        except OSError as error:
            listener.close()
            if wanted == port:
                raise ValueError(f"The port {port} cannot be used: {error.strerror}. Name another.") from None
            continue
        return listener
    raise AssertionError("any port is free")


def make_server(review: Review, listener: socket.socket, secret: str) -> uvicorn.Server:
    """Return a uvicorn server; `run(sockets=[listener])` serves until the process is interrupted."""
    app = make_app(review, secret, listener.getsockname()[1])
    import uvicorn

    return uvicorn.Server(
        uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, lifespan="off")
    )

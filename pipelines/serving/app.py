"""The routes of a server, and the page that lists them."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from html import escape
from importlib.resources import files
from typing import Any

import jinja2
import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse
from markupsafe import Markup
from starlette.responses import Response
from starlette.routing import WebSocketRoute
from starlette.types import ASGIApp

from pipelines.serving import ServeOptions, cartesia, chat, errors, speech
from pipelines.serving.admission import AdmissionQueue
from pipelines.serving.cartesia import CartesiaSocket, EventsRequest, SpeechFields
from pipelines.serving.chat import ChatBody
from pipelines.serving.contexts import WebSocketSpeech
from pipelines.serving.errors import JsonObject, as_api_error
from pipelines.serving.metrics import ServerMetrics
from pipelines.serving.middleware import ADMIT, HEALTH, REQUEST_ID, WEBSOCKET, RequestMiddleware
from pipelines.serving.model import ServedModel
from pipelines.serving.request_body import JsonRoute, cancel
from pipelines.serving.speech import SpeechBody
from pipelines.serving.streaming import Answer, ErrorAnswer, Reply, Serving
from pipelines.serving.voices import VoiceBody, Voices

_VOICES = "/v1/audio/voices"


def create_app(
    model: ServedModel, options: ServeOptions, admission: AdmissionQueue, failed: Callable[[], None]
) -> ASGIApp:
    """The ASGI app of one model. Its startup begins to open the model; `failed` is called if that fails."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncGenerator[None]:
        keeping = asyncio.create_task(model.run(failed))
        yield
        await cancel(keeping)

    serving = Serving(model, options, admission, ServerMetrics(model, admission), Voices(model, options))
    app = FastAPI(
        title="Nightjar",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        # A redirect would lead to whatever host the request's Host header names.
        redirect_slashes=False,
        # Replaces FastAPI's description of the answer to an invalid body.
        responses={"4XX": {"description": "An error in OpenAI's format."}},
    )
    app.router.route_class = JsonRoute
    errors.install(app)
    _add_info_routes(app, serving)
    _add_synthesis_routes(app, serving)
    _add_voice_routes(app, serving.voices)
    _add_pages(app, options)
    return RequestMiddleware(app, options, admission, serving.metrics)


def _add_info_routes(app: FastAPI, serving: Serving) -> None:
    """Adds the routes that report health, metrics and the model."""
    card = serving.model.card
    facts = {
        "object": "model",
        "created": int(time.time()),
        "owned_by": "nightjar",
        "capabilities": msgspec.to_builtins(card.capabilities),
        "sample_rate": card.sample_rate,
    }

    @app.head(HEALTH, include_in_schema=False)
    @app.get(HEALTH)
    def health() -> Response:
        """200 while requests are accepted; 503 while the engine starts, is broken or stuck, or the server
        drains."""
        state = "draining" if serving.admission.closed else serving.model.state
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    @app.get("/metrics")
    def page() -> Response:
        """Metrics for Prometheus."""
        return Response(serving.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    def models() -> JsonObject:
        """The served models with their capabilities and sample rates."""
        return {"object": "list", "data": [{"id": name, **facts} for name in serving.options.names]}

    @app.get("/v1/models/{name:path}")
    def one(name: str) -> JsonObject:
        """One served model."""
        serving.voices.check_model(name)
        return {"id": name, **facts}


def _add_synthesis_routes(app: FastAPI, serving: Serving) -> None:
    """Adds the routes that use the engine."""

    async def reply(
        request: Request, answer: Answer, body: object, streams: bool, api_error: ErrorAnswer = as_api_error
    ) -> Response:
        permit = await request.scope[ADMIT](streams)
        return Reply(serving, permit, answer(serving, body, permit, request.scope[REQUEST_ID]), api_error)

    async def tts(request: Request, body: SpeechFields) -> Response:
        cartesia.check(serving, body)
        return await reply(request, cartesia.answer, body, True)

    @app.post("/v1/audio/speech")
    async def speak(body: SpeechBody, request: Request) -> Response:
        """Speech of a text, in OpenAI's format."""
        return await reply(request, speech.answer, body, speech.check(serving, body), speech.api_error)

    @app.post("/v1/chat/completions")
    async def converse(body: ChatBody, request: Request) -> Response:
        """A model's answer to a dialogue, as text and audio, in OpenAI's format."""
        chat.check(serving, body)
        return await reply(request, chat.answer, body, body.stream, chat.api_error)

    @app.post("/tts/bytes")
    async def speech_bytes(body: SpeechFields, request: Request) -> Response:
        """Speech of a text as bytes, in Cartesia's format."""
        return await tts(request, body)

    @app.post("/tts/sse")
    async def speech_events(body: EventsRequest, request: Request) -> Response:
        """Speech of a text as events, in Cartesia's format."""
        return await tts(request, body)

    contexts = WebSocketSpeech(serving)
    for protocol in (CartesiaSocket,):
        app.router.routes.append(WebSocketRoute(protocol.route, partial(contexts, protocol=protocol)))


def _add_voice_routes(app: FastAPI, voices: Voices) -> None:
    """Adds the routes of voices, in OpenAI's and in Cartesia's format."""
    app.get(_VOICES, description="The model's voices and the stored ones.")(voices.listed)

    @app.post(_VOICES)
    async def add(body: VoiceBody, request: Request) -> dict[str, object]:
        """Stores a voice."""
        await request.scope[ADMIT](False)
        return await asyncio.to_thread(voices.add, body)

    app.delete(_VOICES + "/{name}", description="Deletes a stored voice.")(voices.delete)

    app.get("/voices", description="All voices in Cartesia's format.")(voices.page)
    app.get("/voices/{name}", description="One voice in Cartesia's format.")(voices.card)


def _add_pages(app: FastAPI, options: ServeOptions) -> None:
    """Adds the pages that describe the server: `/`, `/docs` and the schema."""
    schema = app.openapi()
    routes = [f"{method.upper()} {path}" for path, methods in schema["paths"].items() for method in methods]
    about = {
        "name": "Nightjar",
        "about": "Speech over HTTP and WebSocket.",
        "models": list(options.names),
        "docs": "/docs",
        "openapi": "/openapi.json",
        "routes": [*routes, f"GET {WEBSOCKET} (WebSocket)"],
    }
    pages = jinja2.Environment(autoescape=True, trim_blocks=True)
    pages.filters["linked"] = _linked
    html = pages.from_string(files("pipelines.serving").joinpath("docs.html").read_text("utf-8")).render(
        names=", ".join(options.names),
        paths=schema["paths"],
        bodies=schema["components"]["schemas"],
        websocket=WEBSOCKET,
    )
    app.add_api_route("/", lambda: about, include_in_schema=False)
    app.add_api_route("/docs", lambda: HTMLResponse(html), include_in_schema=False)


def _linked(schema: Mapping[str, Any]) -> Markup:
    """A part of the schema as HTML, with links to the bodies that it names."""
    facts = {name: value for name, value in schema.items() if name != "title"}
    html = escape(json.dumps(facts), quote=False)
    linked = re.sub(r'"#/components/schemas/(\w+)"', r'<a href="#\1">\1</a>', html)
    return Markup(f"<code>{linked}</code>")  # noqa: S704 - escaped above

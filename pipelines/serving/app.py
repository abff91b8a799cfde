"""The routes of a server, and the page that lists them."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
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

from pipelines.serving import cartesia, chat, errors, speech
from pipelines.serving.cartesia import EventsRequest, SpeechFields
from pipelines.serving.chat import ChatBody
from pipelines.serving.contexts import ContextSocket, WebSocketSpeech
from pipelines.serving.elevenlabs import MultiStreamSocket, StreamInputSocket
from pipelines.serving.errors import JsonObject, as_api_error
from pipelines.serving.metrics import MetricsPage, ServerMetrics
from pipelines.serving.middleware import ADMIT, HEALTH, REQUEST_ID, RequestMiddleware
from pipelines.serving.model import ServedModel
from pipelines.serving.request_body import JsonRoute
from pipelines.serving.speech import SpeechBody
from pipelines.serving.speech_stream import SpeechStreamSocket
from pipelines.serving.streaming import Answer, ErrorAnswer, Reply, Serving
from pipelines.serving.voices import VoiceBody, Voices
from pipelines.tasks import cancel

_VOICES = "/v1/audio/voices"
_PROTOCOLS = (ContextSocket, MultiStreamSocket, StreamInputSocket, SpeechStreamSocket)


def create_app(served: Sequence[ServedModel], failed: Callable[[], None]) -> ASGIApp:
    """The ASGI app of one or more models. Its startup begins to open them; `failed` is called if that fails.
    Options of the whole server are those of the first model."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncGenerator[None]:
        keeping = [asyncio.create_task(model.run(failed)) for model in served]
        yield
        await cancel(*keeping)

    page = MetricsPage()
    models = dict[str, Serving]()
    for model in served:
        one = Serving(
            model, model.options, model.admission, ServerMetrics(model, page), Voices(model), models
        )
        models |= dict.fromkeys(model.options.names, one)
    serving = next(iter(models.values()))
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
    _add_info_routes(app, serving, page)
    _add_synthesis_routes(app, serving)
    _add_voice_routes(app, serving)
    _add_pages(app, list(models))
    return RequestMiddleware(app, serving.options, serving.admission, page)


def _add_info_routes(app: FastAPI, serving: Serving, metrics: MetricsPage) -> None:
    """Adds the routes that report health, metrics and the models."""
    created = int(time.time())
    # Each model once, by its first name.
    models = {one.options.names[0]: one for one in serving.models.values()}

    def facts(name: str) -> JsonObject:
        card = serving.of(name).model.card
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "nightjar",
            "capabilities": msgspec.to_builtins(card.capabilities),
            "sample_rate": card.sample_rate,
        }

    @app.head(HEALTH, include_in_schema=False)
    @app.get(HEALTH)
    def health(model: str | None = None) -> Response:
        """200 while requests are accepted, by the named model or by any; 503 while its engine starts, is broken
        or stuck, or the server drains."""
        chosen = models if model is None else {model: serving.of(model)}
        states = {name: one.model.state for name, one in chosen.items()}
        state = "ready" if "ready" in states.values() else next(iter(states.values()))
        state = "draining" if serving.admission.closed else state
        view = {"status": state} | ({"models": states} if len(states) > 1 else {})
        return JSONResponse(view, 200 if state == "ready" else 503)

    @app.get("/metrics")
    def page() -> Response:
        """Metrics for Prometheus."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    def listed() -> JsonObject:
        """The served models with their capabilities and sample rates."""
        return {"object": "list", "data": [facts(name) for name in serving.models]}

    @app.get("/v1/models/{name:path}")
    def one(name: str) -> JsonObject:
        """One served model."""
        return facts(name)


def _add_synthesis_routes(app: FastAPI, serving: Serving) -> None:
    """Adds the routes that use the engine."""

    async def reply(
        request: Request,
        model: Serving,
        answer: Answer,
        body: object,
        streams: bool,
        api_error: ErrorAnswer = as_api_error,
    ) -> Response:
        model.model.check_queue()
        permit = await request.scope[ADMIT](model.admission, streams)
        return Reply(model, permit, answer(model, body, permit, request.scope[REQUEST_ID]), api_error)

    async def tts(request: Request, body: SpeechFields) -> Response:
        model = serving.of(body.model_id, "model_id")
        cartesia.check(model, body)
        return await reply(request, model, cartesia.answer, body, True)

    @app.post("/v1/audio/speech")
    async def speak(body: SpeechBody, request: Request) -> Response:
        """Speech of a text, in OpenAI's format."""
        model = serving.of(body.model)
        return await reply(request, model, speech.answer, body, speech.check(model, body), speech.api_error)

    @app.post("/v1/chat/completions")
    async def converse(body: ChatBody, request: Request) -> Response:
        """A model's answer to a dialogue, as text and audio, in OpenAI's format."""
        model = serving.of(body.model)
        chat.check(model, body)
        return await reply(request, model, chat.answer, body, body.stream, chat.api_error)

    @app.post("/tts/bytes")
    async def speech_bytes(body: SpeechFields, request: Request) -> Response:
        """Speech of a text as bytes, in Cartesia's format."""
        return await tts(request, body)

    @app.post("/tts/sse")
    async def speech_events(body: EventsRequest, request: Request) -> Response:
        """Speech of a text as events, in Cartesia's format."""
        return await tts(request, body)

    contexts = WebSocketSpeech(serving)
    for protocol in _PROTOCOLS:
        app.router.routes.append(WebSocketRoute(protocol.route, partial(contexts, protocol=protocol)))


def _add_voice_routes(app: FastAPI, serving: Serving) -> None:
    """Adds the routes of voices: in OpenAI's format, where the parameter `model` names a model of several, and in
    Cartesia's for the first model. Stored voices belong to all of them."""

    @app.get(_VOICES)
    def listed(model: str | None = None) -> JsonObject:
        """The model's voices and the stored ones."""
        return serving.of(model).voices.listed()

    @app.post(_VOICES)
    async def add(body: VoiceBody, request: Request, model: str | None = None) -> dict[str, object]:
        """Stores a voice."""
        chosen = serving.of(model)
        await request.scope[ADMIT](chosen.admission, False)
        return await asyncio.to_thread(chosen.voices.add, body)

    app.delete(_VOICES + "/{name}", description="Deletes a stored voice.")(serving.voices.delete)

    app.get("/voices", description="All voices in Cartesia's format.")(serving.voices.page)
    app.get("/voices/{name}", description="One voice in Cartesia's format.")(serving.voices.card)


def _add_pages(app: FastAPI, names: list[str]) -> None:
    """Adds the pages that describe the server: `/`, `/docs` and the schema."""
    schema = app.openapi()
    routes = [f"{method.upper()} {path}" for path, methods in schema["paths"].items() for method in methods]
    about = {
        "name": "Nightjar",
        "about": "Speech over HTTP and WebSocket.",
        "models": names,
        "docs": "/docs",
        "openapi": "/openapi.json",
        "routes": [*routes, *(f"GET {protocol.route} (WebSocket)" for protocol in _PROTOCOLS)],
    }
    pages = jinja2.Environment(autoescape=True, trim_blocks=True)
    pages.filters["linked"] = _linked
    html = pages.from_string(files("pipelines.serving").joinpath("docs.html").read_text("utf-8")).render(
        names=", ".join(names),
        paths=schema["paths"],
        bodies=schema["components"]["schemas"],
        protocols=_PROTOCOLS,
    )
    app.add_api_route("/", lambda: about, include_in_schema=False)
    app.add_api_route("/docs", lambda: HTMLResponse(html), include_in_schema=False)


def _linked(schema: Mapping[str, Any]) -> Markup:
    """A part of the schema as HTML, with links to the bodies that it names."""
    facts = {name: value for name, value in schema.items() if name != "title"}
    html = escape(json.dumps(facts), quote=False)
    linked = re.sub(r'"#/components/schemas/(\w+)"', r'<a href="#\1">\1</a>', html)
    return Markup(f"<code>{linked}</code>")  # noqa: S704 - escaped above

"""The routes of a server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.responses import Response
from starlette.routing import WebSocketRoute
from starlette.types import ASGIApp

from pipelines.serving import errors
from pipelines.serving.admission import AdmissionQueue
from pipelines.serving.cartesia import EventsRequest, SpeechFields
from pipelines.serving.chat import ChatBody, ChatRoute
from pipelines.serving.context import Serving
from pipelines.serving.docs_page import docs_page
from pipelines.serving.metrics import ServerMetrics
from pipelines.serving.middleware import ADMIT, HEALTH, REQUEST_ID, WEBSOCKET, RequestMiddleware
from pipelines.serving.model import ServedModel
from pipelines.serving.options import ServeOptions
from pipelines.serving.request_body import JsonRoute
from pipelines.serving.speech import SpeechBody, SpeechRoute
from pipelines.serving.speech_bytes import BytesRoute
from pipelines.serving.streaming import Reply
from pipelines.serving.voices import VoiceBody, Voices
from pipelines.serving.websocket import WebSocketSpeech

#: Bodies of Cartesia's routes, which msgspec reads.
_CARTESIA = {"/tts/bytes": SpeechFields, "/tts/sse": EventsRequest}


def create_app(
    model: ServedModel, options: ServeOptions, gate: AdmissionQueue, failed: Callable[[], None] = lambda: None
) -> ASGIApp:
    """The ASGI app of one model. Its lifespan opens the model; `failed` is called when that cannot be
    done."""
    metrics = ServerMetrics(model, gate)
    # A redirect would lead wherever the request's Host header says.
    app = FastAPI(
        title="Nightjar",
        lifespan=_lifespan(model, failed),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.router.route_class = JsonRoute
    errors.install(app)
    voices = Voices(model, options)
    _add_info_routes(app, model, options, gate, metrics, voices)
    _add_synthesis_routes(app, model, options, metrics, voices)
    _add_voice_routes(app, voices)
    _add_agent_routes(app, Serving(model, options, gate, metrics), voices)
    _add_pages(app, options)
    return RequestMiddleware(app, options, gate, metrics)


def _add_pages(app: FastAPI, options: ServeOptions) -> None:
    """What the server is, for who meets it: `/`, `/docs` and the schema behind it."""
    _, bodies = msgspec.json.schema_components(_CARTESIA.values(), ref_template="#/components/schemas/{name}")
    schema = app.openapi()
    kinds = schema["components"]["schemas"]
    kinds.update(bodies)
    # FastAPI's answer to a wrong body, in whose stead a client gets `errors.error_view`.
    for name in ("HTTPValidationError", "ValidationError"):
        del kinds[name]
    for route in (route for methods in schema["paths"].values() for route in methods.values()):
        route["responses"].pop("422", None)
    routes = [f"{method.upper()} {path}" for path, methods in schema["paths"].items() for method in methods]
    about = {"name": "Nightjar", "about": "Speech over HTTP and WebSocket.", "models": list(options.names)}
    about |= {
        "docs": "/docs",
        "openapi": "/openapi.json",
        "routes": [*routes, f"GET {WEBSOCKET} (WebSocket)"],
    }
    html = docs_page(schema, options.names, WEBSOCKET)
    app.add_api_route("/", lambda: about, include_in_schema=False)
    app.add_api_route("/docs", lambda: HTMLResponse(html), include_in_schema=False)


def _lifespan(model: ServedModel, failed: Callable[[], None]) -> Any:
    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncGenerator[None]:
        keeping = asyncio.create_task(model.run(failed))
        yield
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)

    return lifespan


def _add_info_routes(
    app: FastAPI,
    model: ServedModel,
    options: ServeOptions,
    gate: AdmissionQueue,
    metrics: ServerMetrics,
    voices: Voices,
) -> None:
    """Routes that cost nothing."""
    started_at = int(time.time())

    def cards() -> list[dict[str, Any]]:
        facts = {
            "capabilities": msgspec.to_builtins(model.card.capabilities),
            "sample_rate": model.card.sample_rate,
        }
        return [
            {"id": name, "object": "model", "created": started_at, "owned_by": "nightjar", **facts}
            for name in options.names
        ]

    @app.head(HEALTH, include_in_schema=False)
    @app.get(HEALTH)
    def health() -> Response:
        """200 while requests are taken; 503 while the engine starts, is down or stuck, or the server
        drains."""
        state = "draining" if gate.closed else model.state
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    @app.get("/metrics")
    def page() -> Response:
        """Metrics for Prometheus."""
        return Response(metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        """The models that are served, with their abilities and sample rates."""
        return {"object": "list", "data": cards()}

    @app.get("/v1/models/{name:path}")
    def one(name: str) -> dict[str, Any]:
        """One of them."""
        voices.check_model(name)
        return next(card for card in cards() if card["id"] == name)


def _add_voice_routes(app: FastAPI, voices: Voices) -> None:
    """Stored voices."""
    path = "/v1/audio/voices"

    @app.get(path)
    def listed() -> dict[str, Any]:
        """The model's voices and the stored ones."""
        cards = voices.cards()
        return {"object": "list", "data": cards, "voices": [card["id"] for card in cards]}

    @app.post(path)
    async def add(body: VoiceBody, request: Request) -> dict[str, object]:
        """Stores a voice."""
        await request.scope[ADMIT](False)
        return await asyncio.to_thread(voices.add, body)

    @app.delete(path + "/{name}")
    def delete(name: str) -> dict[str, object]:
        """Deletes a stored voice."""
        return voices.delete(name)


def _add_agent_routes(app: FastAPI, serving: Serving, voices: Voices) -> None:
    """Cartesia's routes."""
    speaking = BytesRoute(serving, voices)
    app.router.routes.append(WebSocketRoute(WEBSOCKET, WebSocketSpeech(serving, voices)))

    @app.post("/tts/bytes", openapi_extra=_body("/tts/bytes"))
    async def speech_bytes(request: Request) -> Response:
        """A text in Cartesia's words; its speech as bytes."""
        fields = speaking.read(await request.json(), SpeechFields)
        parts = speaking.answer(fields, await request.scope[ADMIT](True), request.scope[REQUEST_ID])
        return Reply(parts, serving.options.request_seconds)

    @app.post("/tts/sse", openapi_extra=_body("/tts/sse"))
    async def speech_events(request: Request) -> Response:
        """A text in Cartesia's words; its speech as events."""
        fields = speaking.read(await request.json(), EventsRequest)
        parts = speaking.events(fields, await request.scope[ADMIT](True), request.scope[REQUEST_ID])
        return Reply(parts, serving.options.request_seconds)

    @app.get("/voices")
    def listed(request: Request) -> dict[str, Any]:
        """Voices as Cartesia's clients list them, in pages."""
        return voices.page(request.query_params)

    @app.get("/voices/{name}")
    def one(name: str) -> dict[str, Any]:
        """One voice in Cartesia's words."""
        return voices.card(name)


def _body(path: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{_CARTESIA[path].__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _add_synthesis_routes(
    app: FastAPI, model: ServedModel, options: ServeOptions, metrics: ServerMetrics, voices: Voices
) -> None:
    """Routes that the engine answers."""
    speaking, chatting = SpeechRoute(model, options, metrics, voices), ChatRoute(model, options, metrics)

    @app.post("/v1/audio/speech")
    async def speech(body: SpeechBody, request: Request) -> Response:
        """Speech of a text, in OpenAI's words."""
        voices.check_model(body.model)
        streams = speaking.streams(body)
        speaking.check(body)
        permit = await request.scope[ADMIT](streams)
        return Reply(speaking.answer(body, permit, request.scope[REQUEST_ID]), options.request_seconds)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        """Answers to dialogues of models that write text and audio, in OpenAI's words."""
        voices.check_model(body.model)
        permit = await request.scope[ADMIT](body.stream)
        return Reply(chatting.answer(body, permit, request.scope[REQUEST_ID]), options.request_seconds)

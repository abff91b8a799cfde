"""The routes of a server, and the page that lists them."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from html import escape
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.responses import Response
from starlette.routing import WebSocketRoute
from starlette.types import ASGIApp

from pipelines.errors import NightjarError
from pipelines.serving import ServeOptions, cartesia, chat, errors, speech
from pipelines.serving.admission import AdmissionQueue
from pipelines.serving.cartesia import EventsRequest, SpeechFields
from pipelines.serving.chat import ChatBody
from pipelines.serving.errors import ApiError, as_api_error
from pipelines.serving.metrics import ServerMetrics
from pipelines.serving.middleware import ADMIT, HEALTH, REQUEST_ID, WEBSOCKET, RequestMiddleware
from pipelines.serving.model import ServedModel
from pipelines.serving.request_body import JsonRoute
from pipelines.serving.speech import SpeechBody
from pipelines.serving.streaming import Parts, Reply, Serving
from pipelines.serving.voices import VoiceBody, VoicePage, Voices
from pipelines.serving.websocket import WebSocketSpeech

_VOICES = "/v1/audio/voices"
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24; background: #fff }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #d7dce1 } h3 { margin: 1.5rem 0 0 } p { margin: .25rem 0 }
b { display: inline-block; min-width: 5.25rem; color: #0b5fae } code { font-size: .95em } a { color: #0b5fae }
table { border-collapse: collapse; margin: .5rem 0; width: 100% } tr + tr { border-top: 1px solid #eceff2 }
th, td { text-align: left; vertical-align: top; padding: .2rem .75rem .2rem 0; font-weight: 400 } td:first-child { width: 35% }
@media (prefers-color-scheme: dark) {
  body { color: #e4e7ea; background: #15181c } b, a { color: #79b8ff } h2, tr + tr { border-color: #333a42 }
}
"""


def create_app(
    model: ServedModel, options: ServeOptions, gate: AdmissionQueue, failed: Callable[[], None]
) -> ASGIApp:
    """The ASGI app of one model. Its lifespan opens the model; `failed` is called when that cannot be
    done."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncGenerator[None]:
        keeping = asyncio.create_task(model.run(failed))
        yield
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)

    serving = Serving(model, options, gate, ServerMetrics(model, gate), Voices(model, options))
    # A redirect would lead wherever the request's Host header says.
    app = FastAPI(title="Nightjar", lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.router.route_class = JsonRoute
    errors.install(app)
    _add_info_routes(app, serving)
    _add_synthesis_routes(app, serving)
    _add_voice_routes(app, serving.voices)
    _add_pages(app, options)
    return RequestMiddleware(app, options, gate, serving.metrics)


def _add_info_routes(app: FastAPI, serving: Serving) -> None:
    """Routes that cost nothing."""
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
        """200 while requests are taken; 503 while the engine starts, is down or stuck, or the server
        drains."""
        state = "draining" if serving.gate.closed else serving.model.state
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    @app.get("/metrics")
    def page() -> Response:
        """Metrics for Prometheus."""
        return Response(serving.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        """The models that are served, with their abilities and sample rates."""
        return {"object": "list", "data": [{"id": name, **facts} for name in serving.options.names]}

    @app.get("/v1/models/{name:path}")
    def one(name: str) -> dict[str, Any]:
        """One of them."""
        serving.voices.check_model(name)
        return {"id": name, **facts}


def _add_synthesis_routes(app: FastAPI, serving: Serving) -> None:
    """Routes that the engine answers."""

    async def reply(
        request: Request,
        answer: Callable[..., Parts],
        body: object,
        told: Callable[[NightjarError], ApiError] = as_api_error,
        *,
        streams: bool = True,
    ) -> Response:
        permit = await request.scope[ADMIT](streams)
        return Reply(serving, permit, answer(serving, body, permit, request.scope[REQUEST_ID]), told)

    @app.post("/v1/audio/speech")
    async def speak(body: SpeechBody, request: Request) -> Response:
        """Speech of a text, in OpenAI's words."""
        streams = speech.check(serving, body)
        return await reply(
            request, partial(speech.answer, streams=streams), body, speech.told, streams=streams
        )

    @app.post("/v1/chat/completions")
    async def converse(body: ChatBody, request: Request) -> Response:
        """Answers to dialogues of models that write text and audio, in OpenAI's words."""
        chat.check(serving, body)
        return await reply(request, chat.answer, body, chat.told, streams=body.stream)

    @app.post("/tts/bytes")
    async def speech_bytes(body: SpeechFields, request: Request) -> Response:
        """A text in Cartesia's words; its speech as bytes."""
        cartesia.check(serving, body)
        return await reply(request, cartesia.answer, body)

    @app.post("/tts/sse")
    async def speech_events(body: EventsRequest, request: Request) -> Response:
        """A text in Cartesia's words; its speech as events."""
        cartesia.check(serving, body)
        return await reply(request, cartesia.answer, body)

    app.router.routes.append(WebSocketRoute(WEBSOCKET, WebSocketSpeech(serving)))


def _add_voice_routes(app: FastAPI, voices: Voices) -> None:
    """Voices of the model and stored ones, in OpenAI's words and in Cartesia's."""
    app.get(_VOICES, description="The model's voices and the stored ones.")(voices.listed)

    @app.post(_VOICES)
    async def add(body: VoiceBody, request: Request) -> dict[str, object]:
        """Stores a voice."""
        await request.scope[ADMIT](False)
        return await asyncio.to_thread(voices.add, body)

    app.delete(_VOICES + "/{name}", description="Deletes a stored voice.")(voices.delete)

    @app.get("/voices")
    def page(asked: Annotated[VoicePage, Query()]) -> dict[str, Any]:
        """Voices as Cartesia's clients list them, in pages."""
        return voices.page(asked)

    app.get("/voices/{name}", description="One voice in Cartesia's words.")(voices.card)


def _add_pages(app: FastAPI, options: ServeOptions) -> None:
    """What the server is, for who meets it: `/`, `/docs` and the schema behind it."""
    schema = app.openapi()
    # FastAPI's answer to a wrong body, in whose stead a client gets that of `errors`.
    for name in ("HTTPValidationError", "ValidationError"):
        del schema["components"]["schemas"][name]
    for methods in schema["paths"].values():
        for route in methods.values():
            route["responses"].pop("422", None)
    routes = [f"{method.upper()} {path}" for path, methods in schema["paths"].items() for method in methods]
    about = {
        "name": "Nightjar",
        "about": "Speech over HTTP and WebSocket.",
        "models": list(options.names),
        "docs": "/docs",
        "openapi": "/openapi.json",
        "routes": [*routes, f"GET {WEBSOCKET} (WebSocket)"],
    }
    html = "".join(_page(schema, f"Nightjar serves {escape(', '.join(options.names))}"))
    app.add_api_route("/", lambda: about, include_in_schema=False)
    app.add_api_route("/docs", lambda: HTMLResponse(html), include_in_schema=False)


def _page(schema: Mapping[str, Any], title: str) -> Iterator[str]:
    """The routes and bodies of the schema, and the WebSocket, which no schema describes, as HTML that loads
    nothing, for hosts without a network."""
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    yield f"<style>{_STYLE}</style><h1>{title}</h1>"
    yield '<p>Routes and bodies of this server. Programs read <a href="openapi.json">openapi.json</a>.</p><h2>Routes</h2>'
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            yield f"<h3><b>{method.upper()}</b> <code>{escape(path)}</code></h3><p>{escape(route.get('description', ''))}</p>"
            if "requestBody" in route:
                yield f"<p>Body: {_linked(route['requestBody']['content']['application/json']['schema'])}</p>"
    yield f"<h3><b>GET</b> <code>{escape(WEBSOCKET)}</code></h3><p>A WebSocket: texts in pieces in Cartesia's words; their speech as it "
    yield "is made.</p><h2>Bodies</h2>"
    for name, body in schema["components"]["schemas"].items():
        yield f'<h3 id="{escape(name)}"><code>{escape(name)}</code></h3><p>{escape(body["description"])}</p>'
        for field, facts in body["properties"].items():
            yield f"<p><code>{escape(field)}</code> {_linked(facts)}</p>"
    yield "</html>"


def _linked(schema: Mapping[str, Any]) -> str:
    """A part of the schema with links to the bodies that it names."""
    facts = {name: value for name, value in schema.items() if name != "title"}
    html = escape(json.dumps(facts), quote=False)
    return "<code>" + re.sub(r'"#/components/schemas/(\w+)"', r'<a href="#\1">\1</a>', html) + "</code>"

"""The page `/docs`: the routes and bodies of an OpenAPI schema as HTML that loads nothing, for hosts
without a network."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

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


def docs_page(schema: Mapping[str, Any], names: tuple[str, ...], websocket: str) -> str:
    """The page of a server that speaks with the models of these names, and at this path over a WebSocket,
    which no schema describes."""
    return "".join(_lines(schema, names, websocket))


def _lines(schema: Mapping[str, Any], names: tuple[str, ...], websocket: str) -> Iterator[str]:
    title = f"{escape(schema['info']['title'])} serves {escape(', '.join(names))}"
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    yield f"<style>{_STYLE}</style><h1>{title}</h1>"
    yield '<p>Routes and bodies of this server. Programs read <a href="openapi.json">openapi.json</a>.</p><h2>Routes</h2>'
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            yield f"<h3><b>{method.upper()}</b> <code>{escape(path)}</code></h3><p>{escape(route.get('description', ''))}</p>"
            body = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            if body:
                yield f"<p>Body: {_type(body)}</p>"
    yield f"<h3><b>GET</b> <code>{escape(websocket)}</code></h3><p>A WebSocket: texts in pieces in Cartesia's words; their speech as it "
    yield "is made.</p><h2>Bodies</h2>"
    for name, body in schema["components"]["schemas"].items():
        if body.get("properties"):
            yield f'<h3 id="{escape(name)}"><code>{escape(name)}</code></h3><p>{escape(body.get("description", ""))}</p>'
            yield "<table><tr><th>field<th>type<th>default" + "".join(_rows(body)) + "</table>"
    yield "</html>"


def _rows(body: Mapping[str, Any]) -> Iterator[str]:
    for name, field in body["properties"].items():
        default = "required" if name in body.get("required", ()) else _default(field.get("default"))
        yield f"<tr><td><code>{escape(name)}</code><td>{_type(field)}<td>{default}"


def _default(value: object) -> str:
    return "" if value is None else f"<code>{escape(json.dumps(value))}</code>"


def _type(field: Mapping[str, Any]) -> str:
    """What a value may be, as HTML."""
    if "$ref" in field:
        name = escape(field["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    kinds = [kind for key in ("anyOf", "oneOf") for kind in field.get(key, ()) if kind.get("type") != "null"]
    if kinds:
        return " or ".join(map(_type, kinds))
    values = field.get("enum", [field["const"]] if "const" in field else [])
    if values:
        return ", ".join(f"<code>{escape(json.dumps(value))}</code>" for value in values)
    return (
        f"list of {_type(field['items'])}"
        if "items" in field
        else escape(str(field.get("type", "any value")))
    )

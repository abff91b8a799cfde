"""A language model for people without one: an OpenAI chat server that repeats what it heard, in words, as
a stream."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def answer(heard: str) -> str:
    """The same answer for the same words."""
    return f"You said: {heard.strip().rstrip('.!?')}. I am only a small stub, so this is all that I can say. Ask me something else."


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        said = [message["content"] for message in body["messages"] if message["role"] == "user"]
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        for word in answer(_text(said[-1]) if said else "nothing").split(" "):
            self._send({"role": "assistant", "content": f"{word} "}, None)
        self._send({}, "stop")
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _send(self, delta: dict[str, str], finish: str | None) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        event = {
            "id": "stub",
            "object": "chat.completion.chunk",
            "created": 0,
            "model": "stub",
            "choices": [choice],
        }
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


def _text(content: Any) -> str:
    """The text of a message, which may come in parts."""
    return content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)


@contextmanager
def stub_llm() -> Iterator[str]:
    """A server on a free port of this machine; gives its `base_url`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()

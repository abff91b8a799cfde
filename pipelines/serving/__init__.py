"""What a server may be told: names, keys and limits."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How one model is served."""

    #: What clients call the model; the first one is what answers say.
    names: tuple[str, ...]
    #: Keys that open the API; none: it is open to whoever reaches it.
    keys: tuple[str, ...] = field(default=(), repr=False)
    #: Names of the host by which a server without a key may be asked, besides those of loopback.
    allowed_hosts: tuple[str, ...] = ()
    #: Requests that are in the pipeline at once (None: as many as run and wait there), and that wait behind
    #: them before others are refused with 429.
    slots: int | None = None
    waiting_room: int = 512
    #: Longest time that a stream waits for a slot: its listener would not.
    stream_queue_seconds: float = 2.0
    max_body_bytes: int = 32 << 20
    #: Of each audio that a request brings along.
    max_audio_seconds: float = 600.0
    #: Longest time a request may take from its admission to the last byte of its answer.
    request_seconds: float = 600.0
    #: Longest time a client may take to send its request.
    body_seconds: float = 60.0
    #: Connections at once, and the longest time one may take for the headers of a request.
    connections: int = 2048
    header_seconds: float = 10.0
    #: The model is opened again once requests have been in the engine for so long and nothing has come of any
    #: of them.
    stuck_seconds: float = 60.0
    #: How long requests in flight may go on after SIGTERM.
    drain_seconds: float = 60.0
    #: Of a WebSocket: bytes of a message, contexts of one connection and of all, characters of a context, and
    #: how long a context or a connection without a context may say nothing.
    message_bytes: int = 1 << 20
    contexts_per_connection: int = 32
    contexts: int = 1024
    context_characters: int = 50_000
    context_idle_seconds: float = 60.0
    connection_idle_seconds: float = 300.0
    #: Whether a model with `capabilities.text_in` speaks the text of a context while it is being written, and
    #: not sentence by sentence. None: unless the voice is cloned with the text of its recording, whose speech
    #: would begin later than that of a sentence.
    text_in: bool | None = None
    #: Folder of stored voices; None: none are stored.
    voices_folder: Path | None = None


def is_loopback(host: str) -> bool:
    """Whether a name or an address leads to this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

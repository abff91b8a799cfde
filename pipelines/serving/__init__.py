"""The options of a server: names, keys and limits."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of the server of one model."""

    #: Names of the model for clients; answers use the first one.
    names: tuple[str, ...]
    #: Keys of the API; empty: no key is needed.
    keys: tuple[str, ...] = field(default=(), repr=False)
    #: Host names that a server without keys accepts, besides loopback names.
    allowed_hosts: tuple[str, ...] = ()
    #: Maximum requests in the pipeline; None: as many as it runs and queues.
    slots: int | None = None
    #: Maximum requests that wait for a slot; further ones are refused with 429.
    waiting_room: int = 512
    #: Maximum time that a stream waits for a slot.
    stream_queue_seconds: float = 2.0
    max_body_bytes: int = 32 << 20
    #: Maximum length of each recording in a request.
    max_audio_seconds: float = 600.0
    #: Maximum time from the admission of a request to the last byte of its answer.
    request_seconds: float = 600.0
    #: Maximum time in which a client must send its request.
    body_seconds: float = 60.0
    #: Maximum connections, and maximum time for the headers of a request.
    connections: int = 2048
    header_seconds: float = 10.0
    #: The model is reopened if none of its requests makes progress for this long.
    stuck_seconds: float = 60.0
    #: Maximum time for running requests after SIGTERM.
    drain_seconds: float = 60.0
    #: Limits of WebSockets: bytes of a message, contexts of one connection and of all connections, characters
    #: of a context, and idle time of a context and of a connection without contexts.
    message_bytes: int = 1 << 20
    contexts_per_connection: int = 32
    contexts: int = 1024
    context_characters: int = 50_000
    context_idle_seconds: float = 60.0
    connection_idle_seconds: float = 300.0
    #: Whether a model with `capabilities.text_in` speaks the text of a context while it is being written instead
    #: of sentence by sentence. None: yes, except for a voice cloned with its transcript, which would start
    #: later.
    text_in: bool | None = None
    #: Folder of stored voices; None: none are stored.
    voices_folder: Path | None = None


def is_loopback(host: str) -> bool:
    """Whether a host name or an address is a loopback one."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

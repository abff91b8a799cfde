"""What requests may share through vLLM's prefix cache, where token ids do not say what the KV of their positions holds.

vLLM finds a block of KV by a hash of all ids up to its end. Here a block of a prompt is also hashed with the salts of the positions up to
its end (`SALTS` of a request's extras), and blocks that a request generates are never found (`PRIVATE`).
"""

# vLLM is an extra: its imports are checked where it is installed.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportAttributeAccessIssue=false
from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from pipelines.vllm_engine.options import PRIVATE, SALTS


class SharedPrompts:
    """Mixed in before one of vLLM's schedulers."""

    def __init__(self, *arguments: Any, **keys: Any) -> None:
        super().__init__(*arguments, **keys)
        if self.kv_cache_manager.enable_caching:
            coordinator = self.kv_cache_manager.coordinator
            coordinator.cache_blocks = self.kv_cache_manager.cache_blocks = _hashed_blocks(coordinator, self._hash_size)

    @property
    def _hash_size(self) -> int:
        """Positions that one hash stands for."""
        return getattr(self, "hash_block_size", self.block_size)

    def add_request(self, request: Any) -> None:
        if request._block_hasher is not None:
            extra = request_extra(request)
            request.block_hashes[:] = salted(request.block_hashes, self._hash_size, extra.get(SALTS, ()))
            if extra.get(PRIVATE):
                # Blocks behind the prompt get no hash.
                request._block_hasher = None
        super().add_request(request)


def salted(hashes: list[bytes], size: int, salts: list[tuple[int, bytes]]) -> list[bytes]:
    """Hashes of a prompt's blocks of `size` positions, each with the salts that begin before its end; `salts` have one length."""
    known = [b"".join(salt for position, salt in salts if position < end * size) for end in range(1, len(hashes) + 1)]
    return [hashlib.sha256(salt + plain).digest() if salt else plain for salt, plain in zip(known, hashes)]


def request_extra(request: Any) -> dict[str, Any]:
    """`TokenRequest.extra` of vLLM's request."""
    parameters = request.sampling_params
    return (parameters.extra_args or {}) if parameters is not None else {}


def _hashed_blocks(coordinator: Any, size: int) -> Callable[[Any, int], None]:
    """`cache_blocks` of vLLM's coordinator, which itself takes a hash of every full block for granted."""
    plain, managers = coordinator.cache_blocks, coordinator.single_type_managers
    cached = managers[0].num_cached_block if len(managers) == 1 and managers[0].block_size == size else None

    def cache_blocks(request: Any, num_computed_tokens: int) -> None:
        if request._block_hasher is None:
            hashes = len(request.block_hashes)
            # Asked in every step of every sequence; once a prompt's blocks are in, there is nothing more to do.
            if cached is not None and cached.get(request.request_id, 0) >= hashes:
                return
            num_computed_tokens = min(num_computed_tokens, hashes * size)
        plain(request, num_computed_tokens)

    return cache_blocks

"""Several engine cores of one model on one device: while one's Python prepares a step, the device works for another."""

from __future__ import annotations

from dataclasses import replace

from pipelines.request import EngineState, EngineStats
from pipelines.vllm_engine.host import VllmHost
from pipelines.vllm_engine.library import load_vllm
from pipelines.vllm_engine.options import ModelSpec, TokenRequest, VllmOptions
from pipelines.vllm_engine.receivers import Receiver

#: From the best to the worst place for a request.
_STATES: tuple[EngineState, ...] = ("ready", "starting", "broken")


class VllmCores:
    """Hosts behind one face, each with its share of the sequences and of the memory.

    With a small LM and hundreds of sequences vLLM's scheduler needs more time for a step than the device, which one core would leave
    idle half of the time.
    """

    def __init__(self, spec: ModelSpec, options: VllmOptions, cores: int) -> None:
        """Starts the cores one after the other, since each measures the memory that is left. Raises what `VllmHost` does."""
        load_vllm(options.cpu_kv_gib)
        from pipelines.vllm_engine.adapter import most_sequences
        from pipelines.vllm_engine.core_metrics import CoreMetrics

        metrics = CoreMetrics(cores)
        share = replace(
            options,
            max_sequences=-(-most_sequences(options) // cores),
            waiting_room=-(-options.waiting_room // cores),
            memory_share=None if options.memory_share is None else options.memory_share / cores,
        )
        self._hosts: list[VllmHost] = []
        try:
            for core in range(cores):
                self._hosts.append(VllmHost(spec, share, metrics.of(core)))
        except BaseException:
            self.close()
            raise

    @property
    def max_context(self) -> int:
        """Positions of a sequence: prompt and new tokens."""
        return self._hosts[0].max_context

    @property
    def dtype(self) -> str:
        return self._hosts[0].dtype

    def submit(self, request: TokenRequest, receiver: Receiver) -> None:
        """Queues a sequence on the core that has the least to do; see `VllmHost.submit`."""
        min(self._hosts, key=_load).submit(request, receiver)

    def abort(self, request_id: str) -> None:
        """Ends all sequences with this id; see `VllmHost.abort`."""
        for host in self._hosts:
            host.abort(request_id)

    def cancel(self, request: TokenRequest) -> None:
        """Ends this one sequence; see `VllmHost.cancel`."""
        for host in self._hosts:
            host.cancel(request)

    def stats(self, audio_seconds: float = 0.0) -> EngineStats:
        """Those of all cores together; the KV use is the fullest core's, the state the worst one's."""
        each = [host.stats() for host in self._hosts]
        return EngineStats(
            sum(one.running for one in each),
            sum(one.waiting for one in each),
            sum(one.requests_done for one in each),
            sum(one.frames for one in each),
            audio_seconds,
            max(one.kv_use for one in each),
            _STATES[max(_STATES.index(one.state) for one in each)],
        )

    def close(self) -> None:
        """Ends all cores; see `VllmHost.close`."""
        for host in self._hosts:
            host.close()


def _load(host: VllmHost) -> tuple[int, int]:
    stats = host.stats()
    return _STATES.index(stats.state), stats.running + stats.waiting

"""Pipecat services for the speech server of Nightjar."""

from pipecat_nightjar.http import NightjarHttpTTSService
from pipecat_nightjar.settings import NightjarTTSSettings

__all__ = ["NightjarHttpTTSService", "NightjarTTSSettings"]

"""Pipecat services for the speech server of Nightjar."""

from pipecat_nightjar.http import NightjarHttpTTSService
from pipecat_nightjar.settings import NightjarTTSSettings
from pipecat_nightjar.websocket import NightjarTTSService

__all__ = ["NightjarHttpTTSService", "NightjarTTSService", "NightjarTTSSettings"]

"""Qwen3-TTS, 12 Hz family: voice clones, named voices and designed voices, on the native engine."""

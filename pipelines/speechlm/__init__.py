"""SpeechLM: a Qwen3 that hears and writes text and eight streams of codec tokens, with guidance of the
audio."""

"""SpeechLM: a Qwen3 that reads text and audio, and writes text and eight streams of codec tokens, with
optional guidance of the audio."""

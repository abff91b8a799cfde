"""Dialogues of a file, asked of a server that speaks OpenAI's API, and its answers on disk."""

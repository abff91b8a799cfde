"""Quality checks of speech: fast checks of every draw, meters in separate processes, and their verdict."""

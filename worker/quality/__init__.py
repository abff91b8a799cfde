"""Quality checks of speech: cheap gates on every draw, meters in processes of their own, and what a
failure leads to."""

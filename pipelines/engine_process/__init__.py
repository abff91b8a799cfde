"""A pipeline in a process of its own: the child opens the model (`server`), this process talks to it
(`client`)."""

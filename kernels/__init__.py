"""Ops of the engines, registered under `torch.ops.nightjar`, each with a plain PyTorch twin. Knows nothing
of jobs or files."""

"""Ops of the engines, registered under `torch.ops.nightjar`, each with a twin: a plain PyTorch function that
defines its result. Nothing here depends on jobs or files."""

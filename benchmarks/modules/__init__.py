"""Sharded embedding modules, and unmodified TorchRec over the backend."""

"""Reads of the host's tables by its GPUs: their kernels, and the registration of the memory."""

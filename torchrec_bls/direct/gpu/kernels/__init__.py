"""The kernels, in Triton. Nothing imports them before a GPU is to read."""

"""Outputs of modules that are read directly, and the modules of attached processes."""

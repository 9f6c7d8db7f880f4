"""Outputs of modules that read directly, and the modules of attached processes."""

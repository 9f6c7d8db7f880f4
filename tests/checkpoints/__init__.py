"""Checkpoints that are read by rows."""

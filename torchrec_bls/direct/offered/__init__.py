"""Hands tables over to a process that comes later."""

"""Encoded rows: speed, and exchanges of them."""

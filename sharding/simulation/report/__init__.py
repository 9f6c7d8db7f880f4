"""Simulations as text, JSON, pages and traces."""

"""Wheels for several Pythons: how they are built, and what they may link."""

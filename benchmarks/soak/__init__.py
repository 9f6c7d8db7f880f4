"""Exchanges for a long time, with every byte and every resource checked."""

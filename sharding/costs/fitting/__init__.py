"""Fits the models of a profile to measurements."""

"""Recorded jobs: their replay, and their rating by the paper's algorithm."""

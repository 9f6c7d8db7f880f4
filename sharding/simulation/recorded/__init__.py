"""Recorded jobs, and their replay."""

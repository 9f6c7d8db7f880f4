"""Simulates steps of a job: tasks of its ranks, on the cores of its hosts."""

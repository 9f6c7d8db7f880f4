"""Ranks that do at random whatever requests, data and people may do to them.

`python -m tests.random_actions` draws 10^5 actions, pytest some hundred.
"""

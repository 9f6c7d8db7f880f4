"""Bounded-lag collectives over a process group."""

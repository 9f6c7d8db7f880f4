"""Tests of the planner's cost models and of the planner."""

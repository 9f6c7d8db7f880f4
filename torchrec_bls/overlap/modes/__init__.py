"""The ways for gradients to travel: measured, fitted, and kept in profiles."""

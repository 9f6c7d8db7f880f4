"""Bounded-lag one-sided embedding all-to-alls for TorchRec."""

"""Reducing gradients while the backward pass goes on."""

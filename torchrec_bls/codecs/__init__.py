"""Codecs for rows of embeddings and gradients."""

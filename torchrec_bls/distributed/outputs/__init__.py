"""The way of embeddings from the lookups back to the ranks that asked for them."""

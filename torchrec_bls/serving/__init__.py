"""Models that read tables directly: their generations, and processes that attach to them."""

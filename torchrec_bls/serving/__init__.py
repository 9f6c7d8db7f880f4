"""Models that read tables directly: their generations, and the processes that come and go."""

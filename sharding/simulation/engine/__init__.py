"""Task graphs, and when their tasks begin and end."""

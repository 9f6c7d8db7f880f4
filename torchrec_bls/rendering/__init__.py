"""Reports as text, pages and traces: the one writer for all commands."""

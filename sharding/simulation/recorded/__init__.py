"""Jobs that ran and were recorded: replayed, and rated as the paper rates them."""

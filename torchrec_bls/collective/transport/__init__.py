"""How the ranks of a channel meet, and what its messages travel by."""

"""What dense layers take: their ops, and times of these on a core."""

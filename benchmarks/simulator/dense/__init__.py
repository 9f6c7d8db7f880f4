"""The times of dense layers: their ops, and the time of each op on a core."""

"""The module side: lookups in the tables of all ranks, in place of exchanges."""

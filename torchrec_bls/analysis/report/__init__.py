"""The results of an analysis, for people and machines."""

"""The model of fused lookups."""

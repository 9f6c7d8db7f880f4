"""What is measured of a model before its training."""

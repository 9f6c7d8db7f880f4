"""What an analysis found, for people and machines."""

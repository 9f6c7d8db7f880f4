"""The ids of a batch, from the checks of what came in to the ranks that hold their rows."""

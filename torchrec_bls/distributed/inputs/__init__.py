"""The ids of a batch: the checks of the input, and the way to the ranks that hold the rows."""

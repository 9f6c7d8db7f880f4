"""One direction of one module: a channel, posts in order, and what ranks agree on first."""

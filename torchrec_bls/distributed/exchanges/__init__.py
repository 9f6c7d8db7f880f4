"""The exchange of one direction of one module: a channel, posts in order, and agreements."""

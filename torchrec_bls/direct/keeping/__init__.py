"""A process that owns the tables of a service, and refreshes them."""

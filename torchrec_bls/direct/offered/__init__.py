"""How tables are handed over to a process that comes later."""

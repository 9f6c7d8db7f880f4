"""How often the rows of tables recur."""

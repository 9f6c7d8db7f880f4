"""Steps under random delays and uneven work, by the bound."""

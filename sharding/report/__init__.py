"""A plan's prediction as text, HTML and figures."""

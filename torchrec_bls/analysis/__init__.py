"""Analysis of embedding tables: what a model looks up, which rounding its tables bear, and what
compression brings."""

"""What a model looks up, how its tables bear rounding, and what compressing them is worth."""

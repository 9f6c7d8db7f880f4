"""The search for the plan whose slowest rank is fastest, and what bounds it from below."""

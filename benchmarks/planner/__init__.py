"""The planner: its cost models, its search, its plans executed."""

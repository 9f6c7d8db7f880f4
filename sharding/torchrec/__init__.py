"""The seam to TorchRec's planner: its tables and plans, estimators, providers and reporters."""

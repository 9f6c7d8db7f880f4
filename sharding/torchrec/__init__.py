"""The connection to TorchRec's planner: tables and plans, estimators, providers and reporters."""

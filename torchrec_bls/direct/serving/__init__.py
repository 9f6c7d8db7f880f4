"""Versions of a model's weights in one process: who announces, who follows, what is served."""

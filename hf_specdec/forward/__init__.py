"""Forwards of the target and of draft networks, and what a model can do."""

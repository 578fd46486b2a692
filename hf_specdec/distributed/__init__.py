"""Processes that share one model, and device placement."""

"""Forwards of draft models and draft heads."""

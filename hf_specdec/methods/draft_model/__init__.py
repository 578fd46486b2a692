"""Draft-model speculation."""

"""Gemma 4's assistants, draft models that read the target's keys and values."""

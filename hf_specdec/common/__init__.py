"""Draft trees, records of steps and calls, files: modules that every layer may import."""

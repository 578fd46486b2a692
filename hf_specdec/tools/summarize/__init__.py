"""Summaries of the same articles by plain generation and by a method, with ROUGE scores."""

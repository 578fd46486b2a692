"""Summaries of articles by any method, their ROUGE scores and their speed."""

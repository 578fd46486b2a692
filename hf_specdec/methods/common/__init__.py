"""Shared by several methods: configurations, drafters, draft heads and their files, n-grams."""

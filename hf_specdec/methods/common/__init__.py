"""What several methods share: configurations, drafters, draft heads and their files, n-grams."""

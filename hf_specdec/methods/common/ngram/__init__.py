"""The index and the pool of n-grams that several methods share."""

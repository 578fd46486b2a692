"""The cost of a forward by its number of tokens, and the budget that follows from it."""

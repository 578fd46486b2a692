"""A draft head in one folder: it reads the sum of a token's embedding and the state before it."""

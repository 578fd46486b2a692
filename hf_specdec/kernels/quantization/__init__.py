"""Weights in eight and four bits: what a machine can do, how they are loaded, and what they cost in accuracy."""

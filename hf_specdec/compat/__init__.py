"""Every name of transformers, accelerate and torch that is private or may move, by theme, each with its reason.

Nothing else in the package imports a private name of theirs, or asks what a release has. Tried with transformers 5.23
and 5.24.
"""

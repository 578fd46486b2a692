"""Models and draft heads from checkpoints, and what is written for others to load."""

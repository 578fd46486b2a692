"""Nothing drafted."""

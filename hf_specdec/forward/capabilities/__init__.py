"""What a model can do, found by trying."""

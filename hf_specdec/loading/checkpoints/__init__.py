"""Checks of checkpoint folders: their files, and the tokenizers in them."""

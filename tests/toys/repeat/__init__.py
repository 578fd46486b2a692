"""A method in one folder: it repeats the last token."""

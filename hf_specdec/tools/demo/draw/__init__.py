"""Races as HTML and SVG: pure functions from a record to text. Every text of a visitor goes through `markup`."""

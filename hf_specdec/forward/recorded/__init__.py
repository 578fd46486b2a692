"""Forwards of a few tokens on CPUs, recorded once and replayed by the compiled core without the model's code."""

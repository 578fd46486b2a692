"""Rows of other libraries, each library in a process of its own (docs/guides/benchmark.md)."""

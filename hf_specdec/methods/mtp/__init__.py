"""Multi-token prediction layers."""

"""Measurements that a stranger can rerun."""

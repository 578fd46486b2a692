"""Probes: short trials that find out which forwards a model computes as plain generation does."""

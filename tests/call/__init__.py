"""Tests of requests and plans."""

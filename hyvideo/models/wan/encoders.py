"""Placeholder."""

PARTS = ()

"""Measurements for readers."""

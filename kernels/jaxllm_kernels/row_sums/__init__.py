"""Sums over the last axis whose order is fixed."""

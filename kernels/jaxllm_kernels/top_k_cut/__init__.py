"""Cuts the tail off each row's distribution: min-p, top-k and top-p in one threshold."""

"""Figures of engines and requests, as plain data, and the trace spans made from them."""

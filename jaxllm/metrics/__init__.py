"""Figures about engines and requests, as plain data; spans that are made of them."""

"""Joins the host side, which plans steps, and the device side, which runs them."""

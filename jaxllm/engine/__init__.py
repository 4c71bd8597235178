"""Joins the host side, which plans, and the device side, which runs."""

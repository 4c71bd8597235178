"""Readers for the files of processors, a module for each family."""

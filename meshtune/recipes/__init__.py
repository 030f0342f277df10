"""Recipes: the sections joined, and what a command does with them, built from the parts of every other room."""

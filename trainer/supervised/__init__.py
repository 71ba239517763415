"""Supervised training: prompts and responses to learn."""

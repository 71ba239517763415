"""Sections of the trainer's settings, and how their names are checked. Pydantic only."""

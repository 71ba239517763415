"""Sections of a run's config that belong to no room."""

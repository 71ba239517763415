"""Evaluation beside training, and what its figures mean."""

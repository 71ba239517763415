"""Prompt to trajectory: data sets, prompts, sampling, generation engines and their weights."""

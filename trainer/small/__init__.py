"""Models and tokenizers that are made on the spot."""

"""LoRA: adapters in a model, in a push and on disk."""

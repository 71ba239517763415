"""The model that is trained: loaded, made fast and small, asked for logprobs."""

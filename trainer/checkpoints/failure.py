"""What a caller of this room has to catch."""


class CheckpointFailed(Exception):
    """A checkpoint was not written or does not fit; earlier ones are as they were."""

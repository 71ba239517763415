"""The trainer room: reference -> advantage -> step -> weights. Knows nothing of gRPC."""

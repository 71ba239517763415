"""The actors: the one floor that knows gRPC and the one floor that imports rooms."""

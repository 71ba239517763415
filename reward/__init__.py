"""TRAJECTORY -> REWARD: reward functions, and the killable workers that run them. Imports no torch and no gRPC."""

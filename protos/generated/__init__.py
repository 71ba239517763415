"""Twins of the .proto files, written by protos/generate.py."""

"""Streaming queries: how they start, what they read, and how they stop."""

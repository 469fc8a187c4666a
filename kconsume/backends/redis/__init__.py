"""`redis://`: offsets in Redis, applied together with the handler's commands."""

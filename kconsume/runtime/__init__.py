"""The engine room: source → lanes → handler → failures → tracker → backend. Nothing reaches back."""

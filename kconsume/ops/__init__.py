"""Operations: the room for lag, health, metrics and the control channel. Empty in this version."""

"""The page: the room for `kconsume ui`. Empty in this version."""

"""`kconsume failed`: records that Redis applied in part, and the decision about them."""

"""`kconsume outbox`: the rows that wait, what blocks them, and the decision about them."""

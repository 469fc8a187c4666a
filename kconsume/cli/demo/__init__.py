"""`kconsume demo`: two consumers, one of them killed, and the rows counted at the end."""

"""`kconsume check`: what would run, with which guarantee, and what is wrong with it."""

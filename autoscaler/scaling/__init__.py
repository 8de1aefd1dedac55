"""How many nodes there are: what one is worth, what can be had, and the loop that asks for it."""

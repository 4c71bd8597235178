"""What ops with a state for each request share: the rows of a step, and the loops over them."""

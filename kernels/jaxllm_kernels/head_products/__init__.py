"""Products of each head's rows with a matrix of that head."""

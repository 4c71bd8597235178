"""The gated delta rule: a matrix for each head, to which tokens add and of which they correct."""

"""The state space of Mamba2: a matrix for each head that decays, and to which tokens add."""

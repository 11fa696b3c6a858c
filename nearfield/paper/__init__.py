"""The paper's own algorithms: lazy Gumbel sampling, Monte-Carlo gradients, and the sizes its theorems ask for."""

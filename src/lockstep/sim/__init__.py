"""The real protocol machines of a whole cluster under a virtual clock and a seeded network."""

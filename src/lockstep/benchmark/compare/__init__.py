"""Other ways to train the same model on the same machine, measured in turns with Lockstep."""

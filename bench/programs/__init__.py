"""Training programs as a user writes them, each of which runs alone, under DDP, and under Lockstep."""

"""Who may talk to a job: the key that all its tasks have, and what is derived from it."""

"""The machine that decides once for the whole job: membership, commits, losses, checkpoints, the end."""

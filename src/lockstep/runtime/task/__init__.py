"""One running task: its loop, its links to peers, and what each role does."""

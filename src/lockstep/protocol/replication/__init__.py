"""Servers with a second home: what is handed on, who takes over, and when. `docs/replication.md` has the rules."""

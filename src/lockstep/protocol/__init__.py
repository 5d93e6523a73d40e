"""Decides who must send what to whom in which step. Pure: standard library only, no clock, no thread, no socket."""

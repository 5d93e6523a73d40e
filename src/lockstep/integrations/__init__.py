"""Lockstep in frameworks that bring a loop of their own. Nothing here is imported unless a program asks for it."""

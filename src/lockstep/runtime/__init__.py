"""Runs one task: the loop that feeds the machines and carries out their effects."""

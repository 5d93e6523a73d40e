"""The vocabulary of the protocol: names, events, effects, waits, causes and times. Nothing here decides anything."""

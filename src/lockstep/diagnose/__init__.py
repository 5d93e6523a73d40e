"""From snapshots of all tasks to a verdict. The analysis is pure; collecting and phrasing lie beside it."""

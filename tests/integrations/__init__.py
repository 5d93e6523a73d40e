"""Frameworks over a Lockstep job; ``make test-frameworks`` installs them and runs these."""

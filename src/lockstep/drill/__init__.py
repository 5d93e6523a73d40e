"""Fire drills: small real clusters without torch, a planted fault, and a look at what was reported, and when."""

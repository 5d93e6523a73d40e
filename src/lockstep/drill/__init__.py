"""Fire drills: small real clusters without torch, a planted fault, and a look at what was said of it, and when."""

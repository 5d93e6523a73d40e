"""The lab: what it needs of this machine, the disk image of its hosts, and the hosts themselves."""

"""The protocol of second homes (`protocol/replication`) under every order of events that a search asks for."""

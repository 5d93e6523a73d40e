"""Jobs with second homes (the machines that run) under every order of events that a search asks for."""

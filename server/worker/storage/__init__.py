"""The folder of saved sessions: what their files hold, and which files there are."""

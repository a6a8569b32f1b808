"""The cache of a session slot: keys and values of its text, and the states of recurrent layers."""

"""The playground: a chat in the browser, and a view of how each token was drafted."""

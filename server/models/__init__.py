"""Several models behind one address: found in folders, loaded when a request names them, unloaded for room or when idle."""

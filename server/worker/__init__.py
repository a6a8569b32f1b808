"""The worker process: the decode loop over its sessions."""

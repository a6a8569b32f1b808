"""The worker process: loads the model and runs the decode loop over its sessions."""

"""Self-speculation: the target drafts for itself by forwards that skip some of its layers."""

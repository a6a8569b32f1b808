"""Many machines: an ingress and model replicas on Ray Serve. Nothing else imports Ray, and this only when it is used."""

"""Where engines come from when nobody lists them: Kubernetes pods, and the addresses of DNS names."""

"""The router as Envoy's endpoint picker: Envoy asks where a request goes and carries the bytes itself."""

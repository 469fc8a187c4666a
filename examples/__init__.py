"""Small but complete services. Each folder is a service, and has a README."""

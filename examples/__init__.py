"""Small but complete services. Each is a folder with a README."""

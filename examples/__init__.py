"""Small real services, each in a folder with its README."""

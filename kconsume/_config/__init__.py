"""The configuration: options, environment variables, client settings, group protocols."""

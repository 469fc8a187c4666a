"""DataFrames for handlers of an app, and sinks that append each record of a topic to a folder or a table once."""

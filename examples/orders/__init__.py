"""Three services on one chain of topics, whose books balance while they are killed."""

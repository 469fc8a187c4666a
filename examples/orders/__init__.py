"""Three services that send records to each other. Their tables stay correct although their processes are killed."""

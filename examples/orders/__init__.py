"""Three services that are connected by topics. Their tables stay correct although their processes are killed."""

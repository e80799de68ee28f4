"""Names of logical axes."""

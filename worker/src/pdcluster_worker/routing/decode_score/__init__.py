"""Choice of a decode worker: a file for each family of policies, one interface (`policies`)."""

"""What comes in: watch events become cache entries and keys of the work queue; probes are answered.  Nothing is decided here."""

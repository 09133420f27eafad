"""Generated from worker/proto by 'make proto'; never edited."""

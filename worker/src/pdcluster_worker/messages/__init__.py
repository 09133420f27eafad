"""Data that rooms and processes exchange."""

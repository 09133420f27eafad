"""The operations that a decoder is made of: one table, an implementation for each device."""

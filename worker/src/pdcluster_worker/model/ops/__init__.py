"""The operations of a decoder: one interface, an implementation per device."""

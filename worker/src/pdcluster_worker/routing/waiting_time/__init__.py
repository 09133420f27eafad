"""How long requests and request groups take until they are complete, and in which order groups are served [R1]-[R6]."""

"""Entry of requests: the choice of decode workers, and of others when one fails."""

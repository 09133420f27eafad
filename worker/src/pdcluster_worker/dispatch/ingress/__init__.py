"""Where a request enters: which decode workers run its choices, and what follows when one fails or leaves."""

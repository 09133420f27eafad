"""Read the workers' `/metrics` and keep a short window of numbers for each pool; only `scraper`
does I/O.
"""

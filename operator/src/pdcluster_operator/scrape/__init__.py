"""Reads the workers' `/metrics` and keeps a short window of numbers for each pool.

`scraper` is the only one that does I/O.  Pure are `page` (text to numbers),
`sample` (two pages to rates) and `windows` (what the autoscaler reads).
`rounds` joins them; who is scraped, and when, is the caller's business.
"""

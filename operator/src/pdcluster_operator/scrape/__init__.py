"""Read the workers' `/metrics` and keep a short window of numbers for each pool.

`scraper` is the only one that does I/O.  Pure are `page` (text to numbers),
`sample` (two pages to rates) and `windows` (input of the autoscaler).
`rounds` joins them; the caller decides which workers are scraped, and when.
"""

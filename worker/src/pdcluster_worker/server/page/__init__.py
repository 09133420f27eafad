"""The page at / for browsers: static files, and the JSON that they draw."""

"""Decide the workers of each pool from scraped numbers: pure, both roles together."""

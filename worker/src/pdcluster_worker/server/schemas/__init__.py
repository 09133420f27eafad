"""The bodies of requests: fields, their checks, and those that are not served."""

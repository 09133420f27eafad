"""The only room that talks to the API server: requests, what is there, what must change, status, events and the lease."""

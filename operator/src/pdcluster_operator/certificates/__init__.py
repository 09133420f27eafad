"""A cluster's certificate authority and the certificate that its workers share: made, read, renewed and rotated; no I/O."""

"""A request on its decode worker: admitted, prefilled here or remotely, decoded."""

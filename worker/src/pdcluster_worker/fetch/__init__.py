"""Downloads a model of the Hugging Face hub into a folder before a worker starts."""

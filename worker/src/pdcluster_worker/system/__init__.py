"""The machine below: CPUs, the GPU driver, files, and the ends of processes, as Linux has them."""

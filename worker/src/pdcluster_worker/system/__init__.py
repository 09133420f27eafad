"""Linux: CPUs, cgroups, the GPU driver, files and process signals."""
